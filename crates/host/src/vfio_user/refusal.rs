//! Why a command is refused. Made by `session.rs` and `memory.rs`.

/// The error that the client gets, and what the log says.
pub(super) struct Refusal {
    pub errno: i32,
    pub why: String,
}

impl Refusal {
    pub(super) fn new(errno: i32, why: impl Into<String>) -> Refusal {
        Refusal { errno, why: why.into() }
    }
}

/// Refuses a command.
pub(super) fn refuse<T>(errno: i32, why: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal::new(errno, why))
}
