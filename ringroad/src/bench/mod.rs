pub fn run(_: Args) -> crate::Outcome {
    unimplemented!()
}
#[derive(clap::Args)]
pub struct Args {}
