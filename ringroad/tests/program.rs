//! Tests of the `ringroad` binary as users run it: output, exit, signals, reload, resource use, and forwarding of frames.

mod idle;

#[path = "program/config.rs"]
mod config;
#[path = "program/lem.rs"]
mod lem;
#[path = "program/machine.rs"]
mod machine;
#[path = "program/mirror.rs"]
mod mirror;
#[path = "program/reload.rs"]
mod reload;
#[path = "program/tools.rs"]
mod tools;
#[path = "program/trouble.rs"]
mod trouble;

mod testing;
