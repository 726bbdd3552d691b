//! How a command ends.

use std::process::ExitCode;

/// The result of a command: an exit code, or an error message for the user.
pub type Outcome = Result<ExitCode, Box<dyn std::error::Error>>;
