//! PvP: a driver sends frames through one port, the device swaps their MAC addresses and sends them back. One core for
//! the driver, one for the device; the same light driver drives our device and a peer's, in turn.

use super::{
    peer::Peers,
    rig::{Common, Device, Pairs, Progress, Rings, Table, finished},
};
use crate::{Outcome, blast::Ring, child::Folder, traffic};
use serde_json::json;
use std::process::ExitCode;

/// Frames reflected by a device on one core, ours against a peer's
#[derive(clap::Args)]
pub struct Args {
    /// The layouts of the rings [default: both]
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["split", "packed"], hide_default_value = true)]
    ring: Vec<Ring>,
    /// Frame sizes without FCS
    #[arg(long, value_delimiter = ',', default_values_t = [64, 256, 1518],
          value_parser = clap::value_parser!(u64).range(60..=65000))]
    size: Vec<u64>,
    /// Whether the driver touches the payload
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["touch"])]
    touch: Vec<Touch>,
    /// Short for --touch notouch
    #[arg(long, conflicts_with = "touch")]
    no_touch: bool,
    /// Entries of each ring
    #[arg(long, value_delimiter = ',', default_values_t = [256],
          value_parser = clap::value_parser!(u32).range(32..=32768))]
    queue_size: Vec<u32>,
    /// The whole matrix: both layouts, six sizes of 64 to 1518, touch and notouch, rings of 256 and 1024
    #[arg(long, conflicts_with_all = ["ring", "size", "touch", "no_touch", "queue_size"])]
    all: bool,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    peer: Peers,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Touch {
    /// Writes 4 bytes of each frame, reads 4 bytes
    Touch,
    /// Leaves it alone: the cost of the rings
    Notouch,
}

/// What is measured at once.
struct Cell {
    rings: Rings,
    size: usize,
    touch: Touch,
}

impl Cell {
    /// As tables name it: what is not the default is said.
    fn name(&self) -> String {
        let notouch = if self.touch == Touch::Notouch { " notouch" } else { "" };
        let ring = if self.rings.size == 256 { String::new() } else { format!(" ring {}", self.rings.size) };
        format!("{} {}{notouch}{ring}", self.rings.layout.name(), self.size)
    }
}

impl Args {
    /// All combinations of what was asked for.
    fn cells(&self) -> Vec<Cell> {
        let (mut layouts, mut sizes) = (self.ring.clone(), self.size.clone());
        let (mut touches, mut queue_sizes) = (self.touch.clone(), self.queue_size.clone());
        if self.no_touch {
            touches = vec![Touch::Notouch];
        }
        if self.all {
            (layouts, sizes) = (vec![Ring::Split, Ring::Packed], vec![64, 128, 256, 512, 1024, 1518]);
            (touches, queue_sizes) = (vec![Touch::Touch, Touch::Notouch], vec![256, 1024]);
        }
        let mut cells = Vec::new();
        for &layout in &layouts {
            for &queue_size in &queue_sizes {
                for &touch in &touches {
                    let rings = Rings { layout, size: queue_size };
                    cells.extend(sizes.iter().map(|&size| Cell { rings, size: size as usize, touch }));
                }
            }
        }
        cells
    }
}

/// Measures every combination with each peer.
pub fn run(args: Args) -> Outcome {
    let Args { common, .. } = &args;
    let (peers, cells) = (args.peer.found()?, args.cells());
    let folder = Folder::new("pvp")?;
    let ours = common.ours(&folder, "ours", "\"unlimited\"", &["mode = \"reflect\""])?;
    let mut progress = Progress::new(peers.len() * cells.len());
    let mut rows = Vec::new();
    for peer in &peers {
        let peer = peer.start(common, &folder, 1, "macswap")?;
        let mut table = Table::new(peer.as_ref().map(|peer| peer.name.as_str()), ["ours", "peer"], &[]);
        for cell in &cells {
            let touch = if cell.touch == Touch::Touch { traffic::Touch::Word } else { traffic::Touch::Nothing };
            let settings = traffic::Settings { touch, ..traffic::Settings::flood(cell.size) };
            let one = |device: &Device| Ok(common.run(device, 0, cell.rings, &settings)?.into());
            let pairs = Pairs::measure(common, &mut progress, (&ours, peer.as_ref()), &cell.name(), one)?;
            let row = json!({
                "ring": cell.rings.layout.name(), "size": cell.size, "touch": cell.touch == Touch::Touch,
                "queue_size": cell.rings.size, "unit": "Mpps",
            });
            rows.push(table.add(cell.name(), row, &pairs, Vec::new()));
            common.save("pvp", &rows, false)?;
        }
        finished();
        let Common { pairs, seconds, .. } = common;
        println!(
            "PvP, Mpps each way through one device core, touch and ring 256 where nothing else is said, {pairs} runs of {seconds} s, median and min–max"
        );
        table.print();
    }
    common.save("pvp", &rows, true)?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn names(line: &str) -> Vec<String> {
        let cli = Cli::try_parse_from(["pvp"].into_iter().chain(line.split_whitespace()));
        cli.unwrap_or_else(|error| panic!("{line}: {error}")).args.cells().iter().map(Cell::name).collect()
    }

    #[test]
    fn cells() {
        assert_eq!(names("--ring packed"), ["packed 64", "packed 256", "packed 1518"]);
        assert_eq!(names("--ring split --size 64 --no-touch"), ["split 64 notouch"]);
        assert_eq!(
            names("--ring split --size 64 --touch touch,notouch --queue-size 256,1024"),
            ["split 64", "split 64 notouch", "split 64 ring 1024", "split 64 notouch ring 1024"]
        );
        assert_eq!(names("--all").len(), 2 * 6 * 2 * 2);
        assert!(Cli::try_parse_from(["pvp", "--all", "--size", "64"]).is_err());
        assert!(Cli::try_parse_from(["pvp", "--no-touch", "--touch", "touch"]).is_err());
    }
}
