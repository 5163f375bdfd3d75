//! The driver files, which the host puts into each sandbox and names in a kernel's argv.

pub const PYTHON_DRIVER: &str = include_str!("../kernels/driver.py");
pub const JAVASCRIPT_DRIVER: &str = include_str!("../kernels/driver.cjs");
