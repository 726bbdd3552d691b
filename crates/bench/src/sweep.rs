//! What drives a device fastest: settings of `ringroad blast`, each in pairs with the plain driver on the same device.

use crate::{
    figures::extend,
    options::{Common, Layouts},
    peer::Peers,
    rig::{Device, Rings},
    session::{Run, Session, Table},
};
use ringroad_ring::BURST;
use ringroad_traffic::{
    self as traffic, Settings,
    child::Folder,
    options::{Ring, gather},
};
use serde_json::{Value, json};

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    layouts: Layouts,
    /// Frames that blast sends at once, as a list
    #[arg(long, value_delimiter = ',', default_values_t = [16, 32, 64],
          value_parser = clap::value_parser!(u64).range(1..=BURST as u64))]
    burst: Vec<u64>,
    /// Frames in flight, as a list; 0: no limit but the rings
    #[arg(long, value_delimiter = ',', default_values_t = [0, 128])]
    window: Vec<u64>,
    /// Pauses of blast after a burst that was not full, as a list: auto, off, 2us
    #[arg(long = "back-off", value_delimiter = ',', default_values = ["off", "2us", "6us", "auto"])]
    back_off: Vec<String>,
    /// Frame size in bytes, without FCS
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(60..=65000))]
    size: u64,
    /// Leave the payload alone
    #[arg(long)]
    no_touch: bool,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    peers: Peers,
}

/// One setting of blast.
struct Cell<'a> {
    burst: u64,
    window: u64,
    back_off: &'a str,
    settings: Settings,
}

impl Args {
    fn cells(&self) -> Result<Vec<Cell<'_>>, String> {
        let mut cells = Vec::new();
        for &burst in &self.burst {
            for &window in &self.window {
                for back_off in &self.back_off {
                    let settings = Settings {
                        burst: burst as usize,
                        window: (window > 0).then_some(window),
                        gather: gather(back_off)?,
                        touch: if self.no_touch { traffic::Touch::Nothing } else { traffic::Touch::Word },
                        ..Settings::flood(self.size as usize)
                    };
                    cells.push(Cell { burst, window, back_off, settings });
                }
            }
        }
        Ok(cells)
    }

    /// Measures all settings on a device with rings of a layout.
    fn measure(
        &self,
        session: &mut Session<'_>,
        device: &Device,
        layout: Ring,
        cells: &[Cell<'_>],
    ) -> Result<(), String> {
        let Args { common, layouts: Layouts { queue_size, .. }, size, no_touch, .. } = self;
        let rings = Rings { layout, size: *queue_size };
        let mut table = Table::new(Some("the plain driver on the same device"), ["blast", "plain"], &[]);
        for Cell { burst, window, back_off, settings } in cells {
            let name = format!("{layout} burst {burst} window {window} back-off {back_off}");
            let plain = Settings { window: None, ..settings.clone() };
            let one = |is_plain: &bool| -> Result<Run, String> {
                let run = if *is_plain {
                    common.run_plain(device, 0, rings, &plain)?
                } else {
                    common.run(device, 0, rings, settings)?
                };
                Ok(run.into())
            };
            let pairs = session.rounds(&name, &[false, true], one)?;
            let mut row: Value = json!({
                "device": device.name, "ring": layout.to_string(), "size": size, "touch": !no_touch,
                "queue_size": queue_size, "unit": "Mpps",
            });
            extend(&mut row, json!({ "burst": burst, "window": window, "back_off": back_off }));
            session.push(table.add(&name, row, &pairs, []))?;
        }
        let title = format!("{}, {size} B, {}", device.name, common.runs());
        session.print(&title, &table.text());
        Ok(())
    }
}

/// Measures every setting on our device and on each peer.
pub fn run(args: &Args) -> Result<(), String> {
    let Args { common, peers, layouts, .. } = args;
    let (found, cells) = (peers.found()?, args.cells()?);
    let folder = Folder::new("sweep")?;
    let ours = common.ours(&folder, "ours", "unlimited", &["mode = \"reflect\""])?;
    let cells_of_all = (found.len() + 1) * layouts.ring.len() * cells.len();
    let mut session = Session::new("sweep", common, cells_of_all, true);
    session.without_missing(&found)?;
    for &layout in &layouts.ring {
        args.measure(&mut session, &ours, layout, &cells)?;
    }
    for peer in &found {
        let Some(device) = peer.start(common, &folder, 1, "macswap")? else { continue };
        for &layout in &layouts.ring {
            args.measure(&mut session, &device, layout, &cells)?;
        }
    }
    session.finish()
}
