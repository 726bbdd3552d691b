//! PvP: a driver sends frames to one port, the device swaps their MAC addresses and sends them back. One core for the driver, one
//! for the device; the same light driver (ours) runs on our device and on the peer's in turn.

use crate::{
    options::Common,
    peer::Peers,
    rig::{Device, Rings},
    session::Session,
};
use ringroad_traffic::{self as traffic, Settings, child::Folder, options::Ring};
use serde_json::{Value, json};

#[derive(clap::Args)]
pub struct Args {
    /// Ring layouts, as a list [default: both]
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["split", "packed"], hide_default_value = true)]
    ring: Vec<Ring>,
    /// Frame sizes in bytes, without FCS, as a list
    #[arg(long, value_delimiter = ',', default_values_t = [64, 256, 1518],
          value_parser = clap::value_parser!(u64).range(60..=65000))]
    size: Vec<u64>,
    /// Whether the driver touches the payload
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["touch"])]
    touch: Vec<Touch>,
    /// Short for --touch notouch
    #[arg(long, conflicts_with = "touch")]
    no_touch: bool,
    /// Numbers of entries of each ring, as a list
    #[arg(long, value_delimiter = ',', default_values_t = [256],
          value_parser = clap::value_parser!(u32).range(32..=32768))]
    queue_size: Vec<u32>,
    /// The whole matrix: both layouts, six sizes from 64 to 1518, touch and notouch, rings of 256 and 1024
    #[arg(long, conflicts_with_all = ["ring", "size", "touch", "no_touch", "queue_size"])]
    all: bool,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    peers: Peers,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Touch {
    /// Write 4 bytes of each frame sent, read 4 bytes of each frame received
    Touch,
    /// Leave it alone: measures the rings
    Notouch,
}

/// One combination of options.
struct Cell {
    rings: Rings,
    size: usize,
    touch: Touch,
}

impl Cell {
    /// Returns its name in tables, which leaves defaults out.
    fn name(&self) -> String {
        let notouch = if self.touch == Touch::Notouch { " notouch" } else { "" };
        let ring = if self.rings.size == 256 { String::new() } else { format!(" ring {}", self.rings.size) };
        format!("{} {}{notouch}{ring}", self.rings.layout, self.size)
    }

    fn row(&self) -> Value {
        json!({
            "ring": self.rings.layout.to_string(), "size": self.size, "touch": self.touch == Touch::Touch,
            "queue_size": self.rings.size, "unit": "Mpps",
        })
    }

    fn settings(&self) -> Settings {
        let touch = if self.touch == Touch::Touch { traffic::Touch::Word } else { traffic::Touch::Nothing };
        Settings { touch, ..Settings::flood(self.size) }
    }
}

impl Args {
    /// Returns all combinations of the options.
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
pub fn run(args: &Args) -> Result<(), String> {
    let Args { common, peers, .. } = args;
    let peers = peers.found()?;
    let cells: Vec<_> = args.cells().into_iter().map(|cell| (cell.name(), cell.row(), cell)).collect();
    let folder = Folder::new("pvp")?;
    let ours = common.ours(&folder, "ours", "unlimited", &["mode = \"reflect\""])?;
    let title = format!(
        "PvP, Mpps each way through one device core, touch and ring 256 unless stated otherwise, {}",
        common.runs()
    );
    let mut session = Session::new("pvp", common, peers.len() * cells.len(), true);
    session.without_missing(&peers)?;
    let devices = peers.iter().map(|peer| peer.start(common, &folder, 1, "macswap"));
    session.compare(&title, &ours, devices, &cells, |device: &Device, cell| {
        Ok(common.run(device, 0, cell.rings, &cell.settings())?.into())
    })?;
    session.finish()
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
