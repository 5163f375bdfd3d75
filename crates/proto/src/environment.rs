//! This module checks the environment variables of one cell. Host and guest apply the same check: the host to report
//! errors to the caller, the guest because its kernels rely on it.

use std::collections::BTreeMap;

/// Maximum number of environment variables of one cell.
const MAX_VARIABLES: usize = 256;

/// Maximum length of all names and values together. It is small enough that a program can be started with a single
/// variable of this size.
const MAX_ENVIRONMENT: usize = 64 << 10;

/// Reports invalid environment variables. The messages contain neither names nor values: the caller may have swapped
/// the two, and values may be secrets.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EnvironmentError {
    #[error("a name of an environment variable consists of letters, digits and `_`, and does not begin with a digit")]
    Name,
    #[error("the value of an environment variable contains a NUL")]
    Value,
    #[error("there are more than `{MAX_VARIABLES}` environment variables")]
    TooMany,
    #[error("the environment variables have more than `{MAX_ENVIRONMENT}` bytes together")]
    TooLarge,
}

pub fn check_environment(variables: &BTreeMap<String, String>) -> Result<(), EnvironmentError> {
    if variables.len() > MAX_VARIABLES {
        return Err(EnvironmentError::TooMany);
    }
    if variables.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>() > MAX_ENVIRONMENT {
        return Err(EnvironmentError::TooLarge);
    }
    if !variables.keys().all(|name| is_name(name)) {
        return Err(EnvironmentError::Name);
    }
    if variables.values().any(|value| value.contains('\0')) {
        return Err(EnvironmentError::Value);
    }
    Ok(())
}

fn is_name(name: &str) -> bool {
    let mut bytes = name.bytes();
    bytes.next().is_some_and(|first| first.is_ascii_alphabetic() || first == b'_')
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, value: &str) -> Result<(), EnvironmentError> {
        check_environment(&[(name.to_owned(), value.to_owned())].into())
    }

    #[test]
    fn names_and_values_are_what_a_shell_could_set() {
        for name in ["A", "_", "_a1", "__proto__", "PATH"] {
            assert_eq!(check(name, "x=\n\u{e9}"), Ok(()), "{name}");
        }
        for name in ["", "1A", "A B", "A=B", "A-B", "\u{e9}", "A\0", "A\n"] {
            assert_eq!(check(name, ""), Err(EnvironmentError::Name), "{name}");
        }
        assert_eq!(check("A", "a\0b"), Err(EnvironmentError::Value));
    }

    #[test]
    fn number_and_size_are_bounded() {
        let many = |count: usize| (0..count).map(|i| (format!("A{i}"), String::new())).collect();
        assert_eq!(check_environment(&many(MAX_VARIABLES)), Ok(()));
        assert_eq!(check_environment(&many(MAX_VARIABLES + 1)), Err(EnvironmentError::TooMany));
        assert_eq!(check("A", &"x".repeat(MAX_ENVIRONMENT - 1)), Ok(()));
        assert_eq!(check("A", &"x".repeat(MAX_ENVIRONMENT)), Err(EnvironmentError::TooLarge));
    }
}
