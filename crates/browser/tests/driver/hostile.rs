//! What pages do to the driver.
