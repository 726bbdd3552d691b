//! One run of the driver on a card.

use crate::{options::Common, rig::Device};
use ringroad_traffic::{Lem, LemError, LemTotals, Settings, options::LemOptions};
use std::time::Duration;

/// Connects a driver with rings of this size, lets it run for 0.1 s, and measures the next `--seconds`. `what` is for errors.
pub fn drive(
    (device, common): (&Device, &Common),
    what: &str,
    options: LemOptions,
    ring: u32,
    settings: Settings,
) -> Result<LemTotals, String> {
    let (socket, time) = (device.socket(0)?, Duration::from_secs_f64(common.seconds));
    let work = || {
        let mut driver = Lem::connect(socket, options, ring, settings)?;
        driver.run(Duration::from_millis(100), |_| {})?;
        driver.run(time, |_| {})
    };
    device.awake(|| common.on_driver_cpu(|| work().map_err(|error: LemError| format!("{what}: {error}"))))
}
