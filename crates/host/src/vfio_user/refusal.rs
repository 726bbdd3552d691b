//! Why a command is refused. Made by `session.rs` and `memory.rs`.

/// The error that the client gets, and what the log says.
pub(super) struct Refusal {
    pub errno: i32,
    pub why: String,
    /// A client may ask for this to see whether the device has it: no fault.
    pub is_answer: bool,
}

impl Refusal {
    pub(super) fn new(errno: i32, why: impl Into<String>) -> Refusal {
        Refusal { errno, why: why.into(), is_answer: false }
    }

    /// The device does not have what the client asked for.
    pub(super) fn answer(errno: i32, why: impl Into<String>) -> Refusal {
        Refusal { is_answer: true, ..Refusal::new(errno, why) }
    }
}

/// Refuses a command.
pub(super) fn refuse<T>(errno: i32, why: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal::new(errno, why))
}
