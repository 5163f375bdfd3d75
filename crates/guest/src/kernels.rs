//! This module contains the Python driver, which the host puts into each sandbox and names in the `argv` of a kernel.

pub const PYTHON_DRIVER: &str = include_str!("../kernels/driver.py");
