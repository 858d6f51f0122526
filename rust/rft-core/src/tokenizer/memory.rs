//! Memory of the hash tables.

/// A power of two of slots, addressed by the top bits of a hash. Large ones lie on pages of 2 MiB.
pub struct Table<T> {
    /// The slots, behind those left empty so that they start at a large page.
    held: Vec<T>,
    skipped: usize,
    shift: u32,
}

/// The size of a large page.
const PAGE: usize = 2 << 20;

impl<T: Default> Table<T> {
    /// `size` slots of [`Default`]; a power of two, at least 2.
    pub fn new(size: usize) -> Table<T> {
        Table::with(size, T::default)
    }
}

impl<T: Copy> Table<T> {
    /// `size` slots that hold the same; a power of two, at least 2.
    pub fn filled(size: usize, value: T) -> Table<T> {
        Table::with(size, || value)
    }
}

impl<T> Table<T> {
    fn with(size: usize, value: impl FnMut() -> T) -> Table<T> {
        let bytes = size * size_of::<T>();
        let spare = if bytes >= PAGE { PAGE / size_of::<T>() } else { 0 };
        let mut held: Vec<T> = Vec::with_capacity(size + spare);
        let mut skipped = 0;
        if bytes >= PAGE {
            let address = held.as_ptr() as usize;
            skipped = (address.next_multiple_of(PAGE) - address) / size_of::<T>();
            large_pages(&held);
        }
        held.resize_with(skipped + size, value);
        Table { held, skipped, shift: 64 - size.trailing_zeros() }
    }

    /// The number of slots.
    pub fn len(&self) -> usize {
        self.held.len() - self.skipped
    }

    /// All slots.
    pub fn slots(&self) -> &[T] {
        &self.held[self.skipped..]
    }

    /// The first slot of a hash.
    #[inline(always)]
    pub fn slot(&self, hash: u64) -> usize {
        (hash >> self.shift) as usize
    }

    /// The slot behind a slot.
    #[inline(always)]
    pub fn next(&self, slot: usize) -> usize {
        (slot + 1) & (self.len() - 1)
    }

    /// What hashes are shifted by to give a slot.
    #[inline(always)]
    pub fn shift(&self) -> u32 {
        self.shift
    }

    /// A slot.
    #[inline(always)]
    pub fn at(&self, slot: usize) -> &T {
        &self.held[self.skipped + slot]
    }

    /// A slot, to be written.
    #[inline(always)]
    pub fn at_mut(&mut self, slot: usize) -> &mut T {
        &mut self.held[self.skipped + slot]
    }

    /// Asks for the cache line of a slot.
    #[inline(always)]
    pub fn prefetch(&self, slot: usize) {
        prefetch(self.at(slot));
    }
}

/// The slot, of so many, to try behind a slot where `first` was tried first: the other one of a pair, then the next pair.
#[inline(always)]
pub fn next_near(slot: usize, first: usize, size: usize) -> usize {
    // The same place in its pair as the first: the other one is next.
    let step = if (slot ^ first) & 1 == 0 { slot } else { slot + 2 };
    (step ^ 1) & (size - 1)
}

/// Asks for the cache line of a place.
#[inline(always)]
pub fn prefetch<T>(place: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing and faults nowhere; SSE is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(place).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

/// Asks for 2 MiB pages for the room of an empty list, before it is touched: faults are fewer, and look-ups in tables 7
/// to 15 % faster.
fn large_pages<T>(empty: &Vec<T>) {
    #[cfg(target_os = "linux")]
    {
        let start = (empty.as_ptr() as usize).next_multiple_of(PAGE);
        let end = empty.as_ptr() as usize + empty.capacity() * size_of::<T>();
        if start < end {
            // SAFETY: the range lies inside memory that the list owns; the advice changes no byte of it, and a kernel
            // that refuses it is no error.
            unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = empty;
}
