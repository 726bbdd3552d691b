//! The options of a bench, for its tests.

use clap::{Args, CommandFactory, Parser};

#[derive(Parser)]
struct Cli<A: Args> {
    #[command(flatten)]
    args: A,
}

/// Parses options as on the command line.
pub fn try_parse<A: Args>(words: &str) -> Result<A, clap::Error> {
    let words = ["bench"].into_iter().chain(words.split_whitespace());
    Ok(Cli::try_parse_from(words)?.args)
}

/// The same, for valid options.
pub fn parse<A: Args>(words: &str) -> A {
    try_parse(words).unwrap_or_else(|error| panic!("{words}: {error}"))
}

/// Returns the long help.
pub fn help<A: Args>() -> String {
    Cli::<A>::command().render_long_help().to_string()
}
