//! Options of `bench switch` and `bench latency`: layouts, frame sizes and peers.

use crate::{
    options::{Common, Layouts},
    peer::Peers,
    rig::Rings,
};
use ringroad_traffic::options::Ring;

/// Options of `switch` and `latency`.
#[derive(Debug, clap::Args)]
pub struct Frames {
    #[command(flatten)]
    pub layouts: Layouts,
    /// Frame sizes in bytes, without FCS, as a list
    #[arg(long, value_delimiter = ',', default_values_t = [64, 1518],
          value_parser = clap::value_parser!(u64).range(60..=65000))]
    size: Vec<u64>,
    #[command(flatten)]
    pub common: Common,
    #[command(flatten)]
    pub peers: Peers,
}

impl Frames {
    /// Returns all combinations of layout and frame size.
    pub fn cells(&self) -> Vec<(Rings, usize)> {
        let Frames { layouts: Layouts { ring, queue_size }, size: sizes, .. } = self;
        let with = |&layout: &Ring| sizes.iter().map(move |&size| (Rings { layout, size: *queue_size }, size as usize));
        ring.iter().flat_map(with).collect()
    }
}
