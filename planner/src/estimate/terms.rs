//! What the formula of a step reads.

use super::host::HostLimits;
use super::network::Network;
use super::rates::Rates;
use super::style::Style;

/// What the formula reads beside prices and configuration.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms<'a> {
    pub(super) rates: &'a Rates,
    pub(super) network: &'a Network,
    pub(super) style: &'a Style,
    pub(super) host: &'a HostLimits,
}
