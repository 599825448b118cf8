//! Collectives between the GPUs of ranks, by NCCL, whose library is opened at run time.
//!
//! They are queued like launches. All members of a group queue the same ones in the same order,
//! which is proved when programs are compiled. What NCCL does not have, such as sums that are
//! exchanged in a narrower type and the routing of tokens, goes through the host's memory.

use std::fmt;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{CUDA_MEMCPY2D, CUdeviceptr, CUmemorytype, cuMemcpy2DAsync_v2};
use cudarc::nccl::result::{self, NcclError};
use cudarc::nccl::sys::{self, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use ir::DType;
use ir::sharding::PieceOrder;

use super::context::{Context, Failure, failure};
use super::memory::{Memory, Piece};
use crate::communicator::{Blocks, Combiner, Group, Types};

/// Whether the library can be opened.
pub(crate) fn is_present() -> bool {
    // SAFETY: the library's constructors run as in any program of it.
    unsafe { sys::is_culib_present() }
}

/// What members of a group find each other by.
pub(crate) type Id = Vec<u8>;

/// Ids of some groups. They are of use as long as this process is there.
///
/// # Errors
/// NCCL has none.
pub(crate) fn ids(groups: usize) -> Result<Vec<Id>, Failure> {
    let id = |_| {
        let id = result::get_uniqueid().map_err(refused("ncclGetUniqueId"))?;
        Ok(id.internal.iter().map(|byte| byte.cast_unsigned()).collect())
    };
    (0..groups).map(id).collect()
}

/// What a rank has of the groups that it is in.
#[derive(Debug)]
pub(crate) struct Nccl {
    context: Arc<Context>,
    /// By the members of each group.
    groups: Vec<(Vec<usize>, Member)>,
    /// Where pieces lie one after the other whose places in a tensor are strided.
    scratch: Memory,
}

/// A rank's end of a group.
struct Member {
    handle: ncclComm_t,
    /// Its place among the members.
    place: usize,
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Member").field("place", &self.place).finish_non_exhaustive()
    }
}

// SAFETY: a handle of the library, which takes calls of any thread, one at a time.
unsafe impl Send for Member {}

/// A collective, as far as NCCL has it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Collective<'a> {
    /// All-reduce, in place.
    AllReduce(Combiner),
    /// All-gather of the members' pieces.
    AllGather(&'a Blocks),
    /// Reduce-scatter with a sum.
    ReduceScatter(&'a Blocks),
    /// All-to-all of equal pieces.
    AllToAll,
}

impl Collective<'_> {
    /// Elements of a member's output, for `sent` elements of input; `place` is its position.
    pub(crate) fn received(&self, sent: usize, place: usize) -> usize {
        match self {
            Collective::AllReduce(_) | Collective::AllToAll => sent,
            Collective::AllGather(blocks) => blocks.total(),
            Collective::ReduceScatter(blocks) => blocks.piece(place),
        }
    }
}

impl Nccl {
    /// The ends of some groups, for each rank; `contexts` are the GPUs of ranks from a first one
    /// on, which are those of this process. Members of other processes are waited for. `scratch` is
    /// how many bytes the largest tensor has that a rank gathers or scatters with strides.
    ///
    /// # Errors
    /// The GPUs cannot be connected.
    pub(crate) fn world(
        contexts: &[Arc<Context>],
        first: usize,
        groups: &[(Vec<usize>, Id)],
        scratch: &[usize],
    ) -> Result<Vec<Nccl>, Failure> {
        let mut all = Vec::new();
        for (context, bytes) in contexts.iter().zip(scratch) {
            let scratch = Memory::new(context, *bytes)?;
            all.push(Nccl { context: Arc::clone(context), groups: Vec::new(), scratch });
        }
        let here = first..first + contexts.len();
        for (group, id) in groups {
            let mut internal = [0; 128];
            for (byte, given) in internal.iter_mut().zip(id) {
                *byte = given.cast_signed();
            }
            let id = ncclUniqueId { internal };
            let own = group.iter().enumerate().filter(|(_, rank)| here.contains(rank));
            let own: Vec<(usize, usize)> = own.map(|(place, rank)| (place, *rank)).collect();
            let mut handles: Vec<ncclComm_t> = vec![ptr::null_mut(); own.len()];
            result::group_start().map_err(refused("ncclGroupStart"))?;
            for ((place, rank), handle) in own.iter().zip(&mut handles) {
                contexts[*rank - first].bind()?;
                let (count, place) = (group.len() as i32, *place as i32);
                // SAFETY: the handle stays in its place until the group of calls has ended.
                unsafe { result::comm_init_rank(handle, count, id, place) }
                    .map_err(refused("ncclCommInitRank"))?;
            }
            result::group_end().map_err(refused("ncclGroupEnd"))?;
            for ((place, rank), handle) in own.into_iter().zip(handles) {
                all[rank - first].groups.push((group.clone(), Member { handle, place }));
            }
        }
        Ok(all)
    }

    /// Whether a collective of these types is one of NCCL's.
    pub(crate) fn has(collective: &Collective<'_>, types: Types) -> bool {
        match collective {
            Collective::AllGather(_) | Collective::AllToAll => true,
            Collective::AllReduce(_) | Collective::ReduceScatter(_) => {
                types.dtype == types.exchanged && reduced(types.dtype).is_some()
            }
        }
    }

    /// Bytes of scratch that a collective takes.
    pub(crate) fn scratch_bytes(collective: &Collective<'_>, dtype: DType) -> usize {
        match collective {
            Collective::AllGather(blocks) | Collective::ReduceScatter(blocks)
                if !is_contiguous(blocks) =>
            {
                blocks.total() * dtype.size() as usize
            }
            Collective::AllGather(_)
            | Collective::ReduceScatter(_)
            | Collective::AllReduce(_)
            | Collective::AllToAll => 0,
        }
    }

    /// Whether it has an end of a group.
    pub(crate) fn has_group(&self, group: &Group) -> bool {
        self.groups.iter().any(|(members, _)| members == group.members())
    }

    /// Queues a collective.
    ///
    /// # Errors
    /// It cannot be started.
    ///
    /// # Panics
    /// The rank is not in the group, or the pieces are too short.
    pub(crate) fn start(
        &mut self,
        group: &Group,
        collective: &Collective<'_>,
        dtype: DType,
        [input, output]: [Piece<'_>; 2],
    ) -> Result<(), Failure> {
        self.context.bind()?;
        let member = self.groups.iter().find(|(members, _)| members == group.members());
        let Some((_, member)) = member else {
            unreachable!("a rank exchanges in its own groups");
        };
        let call = Call { member, size: dtype.size() as usize, dtype, scratch: &self.scratch };
        match collective {
            Collective::AllReduce(combiner) => {
                let count = output.len() / call.size;
                call.all_reduce(*combiner, &output, count)
            }
            Collective::AllGather(blocks) => call.all_gather(blocks, &input, &output),
            Collective::ReduceScatter(blocks) => call.reduce_scatter(blocks, &input, &output),
            Collective::AllToAll => call.all_to_all(group.size(), &input, &output),
        }
    }

    /// Ends what other ranks are waited for in, after one has failed.
    pub(crate) fn abort(&mut self) {
        for (_, member) in self.groups.drain(..) {
            // SAFETY: the handle is not used any more.
            let _ = unsafe { result::comm_abort(member.handle) };
        }
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let _ = self.context.bind();
        for (_, member) in self.groups.drain(..) {
            // SAFETY: the handle is not used any more. What is left of the session has been waited
            // for, so that no other rank is.
            let _ = unsafe { result::comm_destroy(member.handle) };
        }
    }
}

/// A collective of one group.
struct Call<'a> {
    member: &'a Member,
    /// Bytes of an element.
    size: usize,
    dtype: DType,
    scratch: &'a Memory,
}

impl Call<'_> {
    fn all_reduce(
        &self,
        combiner: Combiner,
        piece: &Piece<'_>,
        count: usize,
    ) -> Result<(), Failure> {
        let (kind, operation) = (self.kind(), operation(combiner, self.dtype));
        let (from, to) = (at(piece.address()).cast_const(), at(piece.address()));
        // SAFETY: the piece has as many elements, and stays until the session ends.
        unsafe {
            let stream = ptr::null_mut();
            result::all_reduce(from, to, count, kind, operation, self.member.handle, stream)
        }
        .map_err(refused("ncclAllReduce"))?;
        Ok(())
    }

    fn all_gather(
        &self,
        blocks: &Blocks,
        input: &Piece<'_>,
        output: &Piece<'_>,
    ) -> Result<(), Failure> {
        let is_contiguous = is_contiguous(blocks);
        let whole = if is_contiguous { output.clone() } else { self.scratch.whole() };
        let pieces = self.pieces(blocks);
        let own = &pieces[self.member.place];
        assert!(input.len() >= own.len(), "a gather's input is a piece");
        let handle = self.member.handle;
        let is_even = blocks.counts.windows(2).all(|pair| pair[0] == pair[1]);
        // Moves know bytes alone.
        let kind = ncclDataType_t::ncclUint8;
        let from = at(input.address()).cast_const();
        if is_even {
            let to = at(whole.address());
            // SAFETY: the input is a piece, and there is room for all of them.
            unsafe { result::all_gather(from, to, own.len(), kind, handle, ptr::null_mut()) }
                .map_err(refused("ncclAllGather"))?;
        } else {
            grouped(|| {
                for (root, range) in pieces.iter().enumerate() {
                    let to = at(whole.part(range.clone()).address());
                    let (count, root) = (range.len(), root as i32);
                    // SAFETY: as above; others than the root do not read what they send.
                    unsafe {
                        let stream = ptr::null_mut();
                        result::broadcast(from, to, count, kind, root, handle, stream)
                    }
                    .map_err(refused("ncclBroadcast"))?;
                }
                Ok(())
            })?;
        }
        if is_contiguous {
            return Ok(());
        }
        for Rows { packed, whole: place, width, count } in self.rows(blocks) {
            let from = (self.scratch.whole().part(packed.0..self.scratch.bytes()), packed.1);
            let to = (output.part(place.0..output.len()), place.1);
            copy_rows(from, to, width, count)?;
        }
        Ok(())
    }

    fn reduce_scatter(
        &self,
        blocks: &Blocks,
        input: &Piece<'_>,
        output: &Piece<'_>,
    ) -> Result<(), Failure> {
        let mut whole = input.clone();
        if !is_contiguous(blocks) {
            whole = self.scratch.whole();
            for Rows { packed, whole: place, width, count } in self.rows(blocks) {
                let from = (input.part(place.0..input.len()), place.1);
                let to = (whole.part(packed.0..whole.len()), packed.1);
                copy_rows(from, to, width, count)?;
            }
        }
        let pieces = self.pieces(blocks);
        let own = &pieces[self.member.place];
        assert!(output.len() >= own.len(), "a scatter's output is a piece");
        let (kind, handle) = (self.kind(), self.member.handle);
        let operation = operation(Combiner::Sum, self.dtype);
        let to = at(output.address());
        if blocks.counts.windows(2).all(|pair| pair[0] == pair[1]) {
            let (from, count) = (at(whole.address()).cast_const(), own.len() / self.size);
            // SAFETY: the input has all pieces, and there is room for the own one.
            unsafe {
                let stream = ptr::null_mut();
                result::reduce_scatter(from, to, count, kind, operation, handle, stream)
            }
            .map_err(refused("ncclReduceScatter"))?;
            return Ok(());
        }
        grouped(|| {
            for (root, range) in pieces.iter().enumerate() {
                let from = at(whole.part(range.clone()).address()).cast_const();
                let (count, root) = (range.len() / self.size, root as i32);
                // SAFETY: as above; others than the root do not write what they receive.
                unsafe {
                    let stream = ptr::null_mut();
                    result::reduce(from, to, count, kind, operation, root, handle, stream)
                }
                .map_err(refused("ncclReduce"))?;
            }
            Ok(())
        })
    }

    fn all_to_all(
        &self,
        members: usize,
        input: &Piece<'_>,
        output: &Piece<'_>,
    ) -> Result<(), Failure> {
        let bytes = input.len() / members;
        let (kind, handle) = (ncclDataType_t::ncclUint8, self.member.handle);
        grouped(|| {
            for peer in 0..members {
                let range = peer * bytes..(peer + 1) * bytes;
                let from = at(input.part(range.clone()).address()).cast_const();
                let (to, peer) = (at(output.part(range).address()), peer as i32);
                // SAFETY: both have a piece for each member.
                unsafe {
                    result::send(from, bytes, kind, peer, handle, ptr::null_mut())
                        .map_err(refused("ncclSend"))?;
                    result::recv(to, bytes, kind, peer, handle, ptr::null_mut())
                        .map_err(refused("ncclRecv"))?;
                }
            }
            Ok(())
        })
    }

    fn kind(&self) -> ncclDataType_t {
        reduced(self.dtype).unwrap_or_else(|| unreachable!("asked before: NCCL reduces the type"))
    }

    /// Where the members' pieces are in bytes, one after the other.
    fn pieces(&self, blocks: &Blocks) -> Vec<Range<usize>> {
        let mut end = 0;
        let piece = |member: usize| {
            let start = end;
            end += blocks.piece(member) * self.size;
            start..end
        };
        (0..blocks.counts.len()).map(piece).collect()
    }

    /// Where each range of the dim that is cut lies, in the tensor and among the packed pieces.
    fn rows(&self, blocks: &Blocks) -> Vec<Rows> {
        let inner = blocks.inner * self.size;
        let pitch = blocks.counts.iter().sum::<usize>() * inner;
        let placed = blocks.order.placed(&blocks.counts);
        let mut rows = Vec::new();
        for (member, piece) in self.pieces(blocks).into_iter().enumerate() {
            let mut first = piece.start;
            for ir::sharding::Piece { start, size } in &placed[member] {
                let width = size * inner;
                let packed = (first, blocks.counts[member] * inner);
                rows.push(Rows {
                    packed,
                    whole: (start * inner, pitch),
                    width,
                    count: blocks.outer,
                });
                first += width;
            }
        }
        rows
    }
}

/// Bytes of each row of a tensor whose rows are cut.
struct Rows {
    /// The first byte among the packed pieces, and bytes from a row to the next.
    packed: (usize, usize),
    /// The same in the tensor.
    whole: (usize, usize),
    /// Bytes of a row.
    width: usize,
    /// Rows.
    count: usize,
}

/// Whether pieces lie one after the other in the tensor.
fn is_contiguous(blocks: &Blocks) -> bool {
    blocks.outer == 1 && blocks.order == PieceOrder::Ascending
}

/// The type as NCCL reduces it; none where it does not.
fn reduced(dtype: DType) -> Option<ncclDataType_t> {
    match dtype {
        DType::F64 => Some(ncclDataType_t::ncclFloat64),
        DType::F32 => Some(ncclDataType_t::ncclFloat32),
        DType::BF16 => Some(ncclDataType_t::ncclBfloat16),
        DType::F16 => Some(ncclDataType_t::ncclFloat16),
        DType::I64 => Some(ncclDataType_t::ncclInt64),
        DType::I32 => Some(ncclDataType_t::ncclInt32),
        DType::U32 => Some(ncclDataType_t::ncclUint32),
        DType::I8 => Some(ncclDataType_t::ncclInt8),
        DType::Bool => Some(ncclDataType_t::ncclUint8),
        DType::F8E4M3 | DType::F8E5M2 => None,
    }
}

/// The reduction as NCCL has it: over truth values, sums and maxima are *or*.
fn operation(combiner: Combiner, dtype: DType) -> ncclRedOp_t {
    match combiner {
        Combiner::Sum if dtype != DType::Bool => ncclRedOp_t::ncclSum,
        Combiner::Sum | Combiner::Max => ncclRedOp_t::ncclMax,
        Combiner::Min => ncclRedOp_t::ncclMin,
    }
}

/// Calls that are begun together, as they wait for each other.
fn grouped(calls: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
    result::group_start().map_err(refused("ncclGroupStart"))?;
    let done = calls();
    // What was begun is ended, also where a call was refused.
    let ended = result::group_end().map_err(refused("ncclGroupEnd"));
    done?;
    ended?;
    Ok(())
}

/// Queues a two-dimensional copy: `count` rows of `width` bytes, with a pitch at each end.
fn copy_rows(
    (from, from_pitch): (Piece<'_>, usize),
    (to, to_pitch): (Piece<'_>, usize),
    width: usize,
    count: usize,
) -> Result<(), Failure> {
    if width == 0 || count == 0 {
        return Ok(());
    }
    let has_all = |len: usize, pitch: usize| len >= (count - 1) * pitch + width;
    assert!(has_all(from.len(), from_pitch) && has_all(to.len(), to_pitch), "rows are there");
    let copy = CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
        srcHost: ptr::null(),
        srcDevice: from.address(),
        srcArray: ptr::null_mut(),
        srcPitch: from_pitch,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: ptr::null_mut(),
        dstDevice: to.address(),
        dstArray: ptr::null_mut(),
        dstPitch: to_pitch,
        WidthInBytes: width,
        Height: count,
    };
    // SAFETY: both have these rows, and the driver takes a copy of what describes them.
    unsafe { cuMemcpy2DAsync_v2(&raw const copy, ptr::null_mut()) }
        .result()
        .map_err(failure("cuMemcpy2DAsync"))
}

/// An address as NCCL takes it.
fn at(address: CUdeviceptr) -> *mut std::ffi::c_void {
    address as *mut std::ffi::c_void
}

fn refused(call: &'static str) -> impl Fn(NcclError) -> Failure {
    move |NcclError(code)| Failure::new(call, format!("{code:?}"))
}
