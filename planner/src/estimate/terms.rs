//! What the formula of a step reads.

use super::host::HostLimits;
use super::network::Network;
use super::profile::Profile;
use super::rates::Rates;

/// What the formula reads beside prices and configuration.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms<'a> {
    pub(super) rates: &'a Rates,
    pub(super) network: &'a Network,
    pub(super) profile: &'a Profile,
    pub(super) host: &'a HostLimits,
}
