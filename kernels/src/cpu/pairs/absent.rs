//! In place of instructions for pairs, on machines that have none: nothing here is reached.

pub(in crate::cpu) mod amx {
    pub(in crate::cpu::pairs) struct Tiles;

    impl Tiles {
        pub(in crate::cpu::pairs) unsafe fn lay_out() -> Tiles {
            unreachable!("the machine has no tiles")
        }

        pub(in crate::cpu::pairs) unsafe fn multiply(
            &self,
            _tiles: [usize; 2],
            _steps: usize,
            _panels: [*const u8; 2],
            _c: *mut f32,
            _row_bytes: usize,
            _add: bool,
        ) {
            unreachable!("the machine has no tiles")
        }
    }
}

pub(super) mod dot {
    pub(in crate::cpu::pairs) unsafe fn multiply(
        _tiles: [usize; 2],
        _steps: usize,
        _panels: [*const u8; 2],
        _c: *mut f32,
        _row_bytes: usize,
        _add: bool,
    ) {
        unreachable!("the machine has no dot products of pairs")
    }
}

pub(super) mod panels {
    pub(in crate::cpu::pairs) const DEPTH: usize = 32;
    pub(in crate::cpu::pairs) const SIDE: usize = 16;

    #[derive(Clone, Copy)]
    pub(in crate::cpu::pairs) enum Side {
        Rows,
        Columns,
    }

    pub(in crate::cpu::pairs) fn tiles(wide: usize) -> usize {
        if wide > SIDE { 2 } else { 1 }
    }

    pub(in crate::cpu::pairs) unsafe fn pack(
        _side: Side,
        _source: *const u16,
        _wide: &[usize],
        _deep: &[usize],
        _panel: *mut u16,
    ) {
        unreachable!("the machine has no instructions for pairs")
    }
}
