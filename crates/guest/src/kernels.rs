//! This module contains the driver files, which the host puts into each sandbox and names in the `argv` of a kernel.

pub const PYTHON_DRIVER: &str = include_str!("../kernels/driver.py");
pub const JAVASCRIPT_DRIVER: &str = include_str!("../kernels/driver.cjs");
