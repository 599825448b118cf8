//! How many devices a plan takes that is to cost little: of device time, or of energy.

use planner::search::request::{Chosen, best_below};

use super::{Subject, question};
use crate::failure::Failure;
use crate::verbs::flags::{Aim, RequestFlags};

/// Significant bits of the numbers that are tried. Chosen: no other number is more than a 32nd
/// from one of them.
const BITS: u32 = 5;

/// The number of devices, of those that are asked about or fewer, with the cheapest plan: all where
/// nothing fits. They are halved as long as that is cheaper; then what lies between half and twice
/// as many is tried, which has to be cheaper still.
pub(super) fn cheapest(
    subject: &Subject,
    asked: &RequestFlags,
    aim: Aim,
    stop: &(dyn Fn() -> bool + Sync),
) -> Result<u32, Failure> {
    let all = subject.devices;
    // The price of the cheapest plan on `devices` devices, if it is less than `below`.
    let price = |devices: u32, below: f64| -> Result<Option<f64>, Failure> {
        let fewer = Subject { devices, ..subject.clone() };
        let estimator = fewer.estimator()?;
        let asked = question(&fewer, asked, &estimator, aim, stop)?;
        let found = best_below(&asked, below / f64::from(devices));
        Ok(found.and_then(|found| objective_value(&fewer, aim, &found)))
    };
    let (mut best, mut cheapest) = (f64::INFINITY, None);
    let mut half = Some(all);
    while let Some(devices) = half.filter(|_| !stop()) {
        match price(devices, best)? {
            Some(found) => (best, cheapest) = (found, Some(devices)),
            None if cheapest.is_some() => break,
            None => {}
        }
        half = devices.is_multiple_of(2).then_some(devices / 2);
    }
    let [from, to] = cheapest.map_or([1, all], |n| [n / 2 + 1, n.saturating_mul(2).min(all)]);
    for devices in (from..to).rev().filter(|devices| is_tried(*devices, all)) {
        if stop() {
            break;
        }
        if let Some(found) = price(devices, best)? {
            (best, cheapest) = (found, Some(devices));
        }
    }
    Ok(cheapest.unwrap_or(all))
}

/// Whether a number of devices is tried beside halves of `all`.
fn is_tried(devices: u32, all: u32) -> bool {
    let is_half = all.is_multiple_of(devices) && (all / devices).is_power_of_two();
    let bits = u32::BITS - devices.leading_zeros() - devices.trailing_zeros();
    bits <= BITS && !is_half
}

/// What a plan costs: device time, or joules of all devices.
fn objective_value(subject: &Subject, aim: Aim, found: &Chosen) -> Option<f64> {
    match aim {
        Aim::Energy => subject.joules(&found.estimate),
        Aim::Cost | Aim::Time | Aim::Memory | Aim::Pareto => {
            Some(f64::from(subject.devices) * found.estimate.step_time_s)
        }
    }
}
