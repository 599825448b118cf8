//! What facts change in a profile: bytes that are held, and bytes that an update moves.
//!
//! An update reads gradients, reads and writes moments and master weights, and writes weights: what
//! a fact adds to one of them, it adds to the update as often as it is read and written.

use super::{AttentionKernel, Profile, Update, bytes_text, percent};
use crate::estimate::profile::parts::{EAGER, NO_HOST};
use crate::estimate::profile::{Host, MOMENTS_BYTES};

impl Profile {
    /// Bytes of a parameter's moments. A profile counts them with master weights: what it has up to
    /// two moments in f32 are moments.
    pub(in crate::estimate) fn moments_bytes(&self) -> f64 {
        self.stated.moments_bytes.unwrap_or(self.state_bytes.min(MOMENTS_BYTES))
    }

    /// Bytes of a parameter's master weight beside the weight.
    pub(in crate::estimate) fn master_bytes(&self) -> f64 {
        self.state_bytes - self.moments_bytes()
    }
}

pub(super) fn weights(profile: &mut Profile, bytes: f64) {
    profile.update_bytes += bytes - profile.weight_bytes;
    profile.weight_bytes = bytes;
}

/// Sums over micro-batches are read and written, and the update reads them. Gradients are exchanged
/// as they are held, unless they are held as before.
pub(super) fn gradients(profile: &mut Profile, bytes: f64) {
    let more = bytes - profile.gradient_bytes;
    if more == 0.0 {
        return;
    }
    if profile.accumulate_bytes > 0.0 {
        profile.accumulate_bytes = (profile.accumulate_bytes + 2.0 * more).max(2.0 * bytes);
    }
    profile.update_bytes += more;
    profile.gradient_bytes = bytes;
    profile.exchange_bytes = bytes;
}

pub(super) fn reduces(profile: &mut Profile, bytes: f64) {
    profile.exchange_bytes = bytes;
}

pub(super) fn moments(profile: &mut Profile, bytes: f64) {
    let more = bytes - profile.moments_bytes();
    profile.state_bytes += more;
    profile.update_bytes += 2.0 * more;
    profile.stated.moments_bytes = Some(bytes);
}

/// Where there are none, the update reads the weight itself, which it else only writes, and the
/// gradient as it is.
pub(super) fn masters(profile: &mut Profile, bytes: f64) {
    profile.copies_gradients &= bytes > 0.0;
    let before = profile.master_bytes();
    let moments = profile.moments_bytes();
    let is_copy = |masters: f64| masters >= profile.weight_bytes.max(4.0);
    let read = match (is_copy(before), is_copy(bytes)) {
        (true, false) => profile.weight_bytes,
        (false, true) => -profile.weight_bytes,
        (true, true) | (false, false) => 0.0,
    };
    profile.update_bytes += 2.0 * (bytes - before) + read;
    profile.state_bytes = moments + bytes;
    profile.stated.moments_bytes = Some(moments);
}

pub(super) fn adam(profile: &mut Profile, bytes: f64) {
    profile.stated.update = Update::Elements;
    moments(profile, bytes);
}

pub(super) fn sgd(profile: &mut Profile, bytes: f64) {
    adam(profile, bytes);
}

/// The bytes of moments and the time of products are those of each matrix, which
/// [`crate::estimate::layer`] counts.
pub(super) fn muon(profile: &mut Profile) {
    moments(profile, 0.0);
    profile.stated.update = Update::Orthogonal;
}

/// Gradients are read three times: for sums of rows and columns, for the norm of the update, and
/// for the update (Shazeer and Stern 2018, algorithm 4).
pub(super) fn adafactor(profile: &mut Profile) {
    moments(profile, 0.0);
    profile.stated.update = Update::Factored;
    profile.update_bytes += 2.0 * profile.gradient_bytes;
}

/// Fused attention skips what is masked, as releases that had it do.
pub(super) fn flash(profile: &mut Profile, kernel: AttentionKernel) {
    let is_written =
        matches!(profile.attention, AttentionKernel::Separate | AttentionKernel::FusedSoftmax);
    profile.skips_masked |= is_written;
    profile.attention = kernel;
}

pub(super) fn overlaps_tensor(profile: &mut Profile, share: f64) {
    (profile.tensor_hidden, profile.tensor_backward_hidden) = (share, share);
}

pub(super) fn graphs(profile: &mut Profile, are_graphs: bool) {
    let launches = profile.host.forward_s > 0.0;
    profile.host = match (are_graphs, launches) {
        (true, _) => NO_HOST,
        (false, true) => profile.host,
        (false, false) => EAGER,
    };
}

pub(super) fn optimizer_text(profile: &Profile) -> String {
    let moments = profile.moments_bytes();
    match profile.stated.update {
        Update::Orthogonal => "muon",
        Update::Factored => "adafactor",
        Update::Elements if moments == 0.0 => "sgd",
        Update::Elements => {
            // As it was stated; an element-wise one with moments is AdamW where nothing is.
            return profile.stated.word("optimizer").unwrap_or("adamw").to_owned();
        }
    }
    .to_owned()
}

pub(super) fn moments_text(profile: &Profile) -> String {
    match profile.stated.update {
        Update::Elements => bytes_text(profile.moments_bytes()),
        Update::Factored => "4 bytes for each row and column of a matrix".to_owned(),
        Update::Orthogonal => "4 bytes a parameter of layers' matrices, 8 elsewhere".to_owned(),
    }
}

pub(super) fn tensor_text(profile: &Profile) -> String {
    let [forward, backward] = [profile.tensor_hidden, profile.tensor_backward_hidden].map(percent);
    match forward == backward {
        true => forward,
        false => format!("{forward}, and {backward} beside gradients of weights"),
    }
}

pub(super) fn host_text(profile: &Profile) -> String {
    let Host { forward_s, operations, .. } = profile.host;
    match forward_s > 0.0 {
        false => "yes".to_owned(),
        true => format!("no: {:.0} µs a launch", forward_s * operations * 1e6),
    }
}
