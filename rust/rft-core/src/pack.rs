//! Lengths -> bins of at most `capacity` tokens. No limit on the items of a bin.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::str::FromStr;

use crate::error::{Error, Kind};
use crate::order::Permutation;

/// Bins that `stream` keeps open. More gain 0.05 points of fill at most, and those of the start and the end of an epoch, which
/// are made with few or none to come, are no random choice: of 1024 that shows in all sets but large ones
/// (docs/design-notes.md).
const OPEN_BINS: usize = 32;
/// Largest bin.
pub const MAX_CAPACITY: u32 = 1 << 24;
/// Items that `even` spreads at once, at least: few enough that its bins follow the order, enough for a mix in each.
const EVEN_WINDOW: usize = 8192;
/// Bins that such a window gives at least: each window may leave one nearly empty.
const EVEN_BINS: usize = 256;
/// Items whose places and lengths are looked up at once, so that the cache misses of a block overlap.
const BLOCK: usize = 512;

/// How documents share packs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Best fit over open bins in the epoch's order.
    Stream,
    /// Best-fit decreasing over the whole set, bins shuffled.
    Bfd,
    /// Windows of the epoch's order, spread so that bins hold like mixes.
    Even,
    /// Neighbours in the order of the set share a bin; never shuffled.
    Sequential,
    /// Every document a pack.
    None,
}

impl FromStr for Packing {
    type Err = Error;

    fn from_str(name: &str) -> Result<Packing, Error> {
        match name {
            "stream" => Ok(Packing::Stream),
            "bfd" => Ok(Packing::Bfd),
            "even" => Ok(Packing::Even),
            "sequential" => Ok(Packing::Sequential),
            "none" => Ok(Packing::None),
            _ => Err(Error::new(Kind::Argument, "packing", format!("{name:?} is unknown"))
                .wanted("stream, bfd, even, sequential or none")),
        }
    }
}

/// An item that is longer than a bin, or empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Misfit {
    /// Index of the item.
    pub index: usize,
    /// Its length.
    pub length: u32,
}

/// Items by bin: bin b holds `items[offsets[b]..offsets[b + 1]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packed {
    /// Indices of items, bin after bin.
    pub items: Vec<u32>,
    /// Where each bin starts, and the end.
    pub offsets: Vec<u32>,
}

impl Default for Packed {
    fn default() -> Packed {
        Packed { items: Vec::new(), offsets: vec![0] }
    }
}

impl Packed {
    fn with_capacity(items: usize) -> Packed {
        Packed { items: roomy(items), offsets: vec![0] }
    }

    /// Number of bins.
    pub fn len(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Items of a bin.
    pub fn bin(&self, index: usize) -> &[u32] {
        &self.items[self.offsets[index] as usize..self.offsets[index + 1] as usize]
    }

    /// Bins behind these, whose items count from `first` on.
    pub(crate) fn append(&mut self, first: u32, bins: &Packed) {
        let base = self.items.len() as u32;
        self.items.extend(bins.items.iter().map(|item| item + first));
        self.offsets.extend(bins.offsets[1..].iter().map(|offset| offset + base));
    }

    fn push(&mut self, bin: &[u32]) {
        self.items.extend_from_slice(bin);
        self.offsets.push(self.items.len() as u32);
    }

    fn shuffled(&self, order: &Permutation) -> Packed {
        let mut shuffled = Packed { items: roomy(self.items.len()), offsets: Vec::with_capacity(self.offsets.len()) };
        shuffled.offsets.push(0);
        order.to_vec().into_iter().for_each(|bin| shuffled.push(self.bin(bin as usize)));
        shuffled
    }
}

/// The bins of an epoch: each item once, in an order that follows seed and epoch (`shuffle`), or that of the input.
/// O(n) for all but `even`, which sorts windows.
///
/// # Errors
/// [`Misfit`] for the first item that no bin can hold.
///
/// # Panics
/// `capacity` above [`MAX_CAPACITY`].
pub fn arrange(
    lengths: &[u32],
    capacity: u32,
    packing: Packing,
    shuffle: Option<(u64, u64)>,
) -> Result<Packed, Misfit> {
    assert!(capacity <= MAX_CAPACITY, "bins of {capacity}");
    check(lengths, capacity)?;
    let permutation = |salt: u64, n: usize| shuffle.map(|(seed, epoch)| Permutation::new(n as u32, seed, epoch, salt));
    let order = permutation(0, lengths.len());
    let packed = match packing {
        Packing::Stream => return Ok(best_fit_stream(lengths, capacity, order.as_ref())),
        Packing::Sequential => return Ok(next_fit(lengths, capacity)),
        Packing::None => {
            let items: Vec<u32> = order.map_or_else(|| (0..lengths.len() as u32).collect(), |order| order.to_vec());
            return Ok(Packed { offsets: (0..=items.len() as u32).collect(), items });
        }
        Packing::Bfd => best_fit_decreasing(lengths, capacity, order.as_ref()),
        Packing::Even => spread_evenly(lengths, capacity, order.as_ref()),
    };
    Ok(match permutation(1, packed.len()) {
        Some(bins) => packed.shuffled(&bins),
        None => packed,
    })
}

/// An empty vector with room for `capacity` numbers, on huge pages where the system has them: for 10 million items a third
/// of the packing's time would go to page faults.
pub(crate) fn roomy(capacity: usize) -> Vec<u32> {
    let mut numbers: Vec<u32> = Vec::with_capacity(capacity);
    #[cfg(target_os = "linux")]
    {
        const PAGE: usize = 4096;
        let start = numbers.as_mut_ptr() as usize;
        let (from, to) = (start.next_multiple_of(PAGE), (start + capacity * size_of::<u32>()) / PAGE * PAGE);
        if to > from + (4 << 20) {
            // SAFETY: advice about whole pages inside this allocation; it changes no content, and failing is fine.
            unsafe { libc::madvise(from as *mut libc::c_void, to - from, libc::MADV_HUGEPAGE) };
        }
    }
    numbers
}

/// `count` zeros.
fn zeros(count: usize) -> Vec<u32> {
    let mut numbers = roomy(count);
    numbers.resize(count, 0);
    numbers
}

fn check(lengths: &[u32], capacity: u32) -> Result<(), Misfit> {
    match lengths.iter().position(|length| length.wrapping_sub(1) >= capacity) {
        Some(index) => Err(Misfit { index, length: lengths[index] }),
        None => Ok(()),
    }
}

/// Items and their lengths in the order, a block at a time.
struct Blocks<'a> {
    lengths: &'a [u32],
    order: Option<&'a Permutation>,
    next: usize,
    items: [u32; BLOCK],
    found: [u32; BLOCK],
}

impl<'a> Blocks<'a> {
    fn new(lengths: &'a [u32], order: Option<&'a Permutation>) -> Blocks<'a> {
        Blocks { lengths, order, next: 0, items: [0; BLOCK], found: [0; BLOCK] }
    }

    fn at_end(&self) -> bool {
        self.next == self.lengths.len()
    }

    /// (item, length) of the next block; empty at the end.
    fn next(&mut self) -> impl Iterator<Item = (u32, u32)> + '_ {
        let (start, count) = (self.next, BLOCK.min(self.lengths.len() - self.next));
        self.next += count;
        let (items, found) = (&mut self.items[..count], &mut self.found[..count]);
        match self.order {
            None => {
                items.iter_mut().zip(start as u32..).for_each(|(item, number)| *item = number);
                found.copy_from_slice(&self.lengths[start..start + count]);
            }
            Some(order) => {
                order.fill(start as u32, items);
                for (length, item) in found.iter_mut().zip(&*items) {
                    *length = self.lengths[*item as usize];
                }
            }
        }
        self.items[..count].iter().copied().zip(self.found.iter().copied())
    }
}

/// Each item into the open bin if it fits, else into a new one. Lengths are checked.
fn next_fit(lengths: &[u32], capacity: u32) -> Packed {
    let (mut offsets, mut left) = (Vec::new(), 0);
    for (item, length) in lengths.iter().enumerate() {
        if *length > left {
            offsets.push(item as u32);
            left = capacity;
        }
        left -= length;
    }
    offsets.push(lengths.len() as u32);
    Packed { items: (0..lengths.len() as u32).collect(), offsets }
}

/// Best fit in the given order over [`OPEN_BINS`] bins: each item into the fullest that still holds it; where none does, the
/// fullest is closed and an empty one takes its place. Bins are in the order in which they were closed, the open ones of
/// the end fullest first. Lengths are checked. O(n), and memory for the open bins beside the result.
fn best_fit_stream(lengths: &[u32], capacity: u32, order: Option<&Permutation>) -> Packed {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        #[target_feature(enable = "avx2")]
        fn wide(lengths: &[u32], capacity: u32, order: Option<&Permutation>) -> Packed {
            best_fit_stream_plain(lengths, capacity, order)
        }
        // SAFETY: the processor has AVX2.
        return unsafe { wide(lengths, capacity, order) };
    }
    best_fit_stream_plain(lengths, capacity, order)
}

#[inline(always)]
fn best_fit_stream_plain(lengths: &[u32], capacity: u32, order: Option<&Permutation>) -> Packed {
    const BITS: u32 = OPEN_BINS.ilog2();
    // Free space and number of each open bin in one number. All are looked at for every item, in vectors: no branch depends
    // on the lengths but that for "none fits", and mispredicted branches would cost more than the search.
    let mut open: [u32; OPEN_BINS] = std::array::from_fn(|slot| capacity << BITS | slot as u32);
    let mut bins: [Vec<u32>; OPEN_BINS] = std::array::from_fn(|_| Vec::new());
    let mut packed = Packed::with_capacity(lengths.len());
    let mut blocks = Blocks::new(lengths, order);
    while !blocks.at_end() {
        for (item, length) in blocks.next() {
            let taken = length << BITS;
            // Where the item does not fit, the difference wraps to more than any free space.
            let mut least = u32::MAX;
            for bin in &open {
                least = least.min(bin.wrapping_sub(taken));
            }
            if least <= MAX_CAPACITY << BITS {
                let chosen = least.wrapping_add(taken);
                // Not `if`: that would be a masked store, which AMD's processors take hundreds of cycles for.
                for bin in &mut open {
                    *bin -= taken & 0u32.wrapping_sub(u32::from(*bin == chosen));
                }
                bins[least as usize % OPEN_BINS].push(item);
            } else {
                let mut fullest = u32::MAX;
                for bin in &open {
                    fullest = fullest.min(*bin);
                }
                let slot = fullest as usize % OPEN_BINS;
                packed.push(&bins[slot]);
                bins[slot].clear();
                bins[slot].push(item);
                open[slot] = (capacity - length) << BITS | slot as u32;
            }
        }
    }
    open.sort_unstable();
    for bin in open.map(|bin| bin as usize % OPEN_BINS).into_iter().filter(|slot| !bins[*slot].is_empty()) {
        packed.push(&bins[bin]);
    }
    packed
}

/// Windows of the order, each spread over the fewest bins that do: longest item first, each into the emptiest bin, one
/// bin more wherever that does not fit. Lengths are checked. O(n log window) a try, and few tries.
fn spread_evenly(lengths: &[u32], capacity: u32, order: Option<&Permutation>) -> Packed {
    let order = order.map_or_else(|| (0..lengths.len() as u32).collect(), |order| order.to_vec());
    let mut packed = Packed::with_capacity(lengths.len());
    let least_bins = lengths.iter().map(|length| u64::from(*length)).sum::<u64>() / u64::from(capacity);
    let windows = (lengths.len() / EVEN_WINDOW).min(least_bins as usize / EVEN_BINS).max(1);
    for window in 0..windows {
        // Windows of equal size: a short last one would fill its bins badly.
        let at = |window: usize| window * lengths.len() / windows;
        let items = &order[at(window)..at(window + 1)];
        if items.is_empty() {
            continue;
        }
        let mut longest_first: Vec<u32> = (0..items.len() as u32).collect();
        let length = |index: &u32| lengths[items[*index as usize] as usize];
        longest_first.sort_by_key(|index| Reverse(length(index)));
        let sum: u64 = items.iter().map(|item| u64::from(lengths[*item as usize])).sum();
        let mut bins = sum.div_ceil(u64::from(capacity)) as usize;
        let bin_of = loop {
            if let Some(bin_of) = spread(&longest_first, length, bins, capacity) {
                break bin_of;
            }
            bins += (bins / 2000).max(1);
        };
        let mut members = vec![Vec::new(); bins];
        for (item, bin) in items.iter().zip(bin_of) {
            members[bin as usize].push(*item);
        }
        members.iter().filter(|bin| !bin.is_empty()).for_each(|bin| packed.push(bin));
    }
    packed
}

/// The bin of each item; none where one does not fit.
fn spread(longest_first: &[u32], length: impl Fn(&u32) -> u32, bins: usize, capacity: u32) -> Option<Vec<u32>> {
    let mut emptiest: BinaryHeap<(u32, Reverse<u32>)> = (0..bins as u32).map(|bin| (capacity, Reverse(bin))).collect();
    let mut bin_of = vec![0; longest_first.len()];
    for index in longest_first {
        let mut top = emptiest.peek_mut()?;
        top.0 = top.0.checked_sub(length(index))?;
        bin_of[*index as usize] = top.1.0;
    }
    Some(bin_of)
}

/// Best-fit decreasing: longest item first, each into the fullest bin that still holds it. Lengths are checked.
/// Ties keep the order, so the same lengths give the same bins on every machine. Runs of equal items are placed on
/// groups of equal bins at once: O(n + groups).
fn best_fit_decreasing(lengths: &[u32], capacity: u32, order: Option<&Permutation>) -> Packed {
    let (sorted, starts) = longest_first(lengths, capacity as usize, order);
    let mut groups = Groups::new(capacity as usize);
    let mut placed: Vec<Placed> = Vec::new();
    let mut bins = 0u32;
    for length in (1..=capacity as usize).rev() {
        let mut at = starts[length];
        let end = starts[length - 1];
        while at < end {
            let left = end - at;
            let (space, first, count) = groups.take(length).unwrap_or_else(|| {
                let count = left.div_ceil(capacity / length as u32);
                bins += count;
                (capacity as usize, bins - count, count)
            });
            // As many bins of the group as can be filled up with this length, then one that takes the rest.
            let each = (space / length) as u32;
            let full = (left / each).min(count);
            if full > 0 {
                placed.push(Placed { first, bins: full, each, at });
                at += full * each;
                groups.put(space - each as usize * length, first, full);
            }
            if full < count {
                let rest = end - at;
                if rest > 0 {
                    placed.push(Placed { first: first + full, bins: 1, each: rest, at });
                    at += rest;
                    groups.put(space - rest as usize * length, first + full, 1);
                }
                let used = full + u32::from(rest > 0);
                groups.put(space, first + used, count - used);
            }
        }
    }
    lay_out(&sorted, &placed, bins)
}

/// `bins` bins from `first` on got `each` items from `at` on in the sorted order.
struct Placed {
    first: u32,
    bins: u32,
    each: u32,
    at: u32,
}

fn lay_out(sorted: &[u32], placed: &[Placed], bins: u32) -> Packed {
    let mut counts = vec![0u32; bins as usize];
    for run in placed {
        for count in &mut counts[run.first as usize..(run.first + run.bins) as usize] {
            *count += run.each;
        }
    }
    let ends = counts.iter().scan(0, |sum, count| {
        *sum += count;
        Some(*sum)
    });
    let offsets: Vec<u32> = std::iter::once(0).chain(ends).collect();
    let mut place = offsets.clone();
    let mut items = zeros(sorted.len());
    for run in placed {
        let mut from = run.at as usize;
        for place in &mut place[run.first as usize..(run.first + run.bins) as usize] {
            let each = run.each as usize;
            items[*place as usize..*place as usize + each].copy_from_slice(&sorted[from..from + each]);
            from += each;
            *place += run.each;
        }
    }
    Packed { items, offsets }
}

/// Items by decreasing length, stable; `starts[l]` is where length l begins, so it ends at `starts[l - 1]`.
fn longest_first(lengths: &[u32], capacity: usize, order: Option<&Permutation>) -> (Vec<u32>, Vec<u32>) {
    let mut starts = vec![0u32; capacity + 1];
    for length in lengths {
        starts[*length as usize] += 1;
    }
    let mut sum = 0;
    for start in starts.iter_mut().rev() {
        let count = *start;
        *start = sum;
        sum += count;
    }
    let mut place = starts.clone();
    let mut sorted = zeros(lengths.len());
    let mut blocks = Blocks::new(lengths, order);
    while !blocks.at_end() {
        for (item, length) in blocks.next() {
            let at = &mut place[length as usize];
            sorted[*at as usize] = item;
            *at += 1;
        }
    }
    (sorted, starts)
}

/// Groups of bins with the same free space.
struct Groups {
    spaces: Set,
    stacks: Vec<Vec<(u32, u32)>>,
    capacity: usize,
}

impl Groups {
    fn new(capacity: usize) -> Groups {
        Groups { spaces: Set::new(capacity), stacks: vec![Vec::new(); capacity + 1], capacity }
    }

    fn put(&mut self, space: usize, first: u32, bins: u32) {
        if space > 0 && space < self.capacity && bins > 0 {
            self.spaces.insert(space);
            self.stacks[space].push((first, bins));
        }
    }

    /// The group with the least space that holds `length`.
    fn take(&mut self, length: usize) -> Option<(usize, u32, u32)> {
        let space = self.spaces.next(length)?;
        let (first, bins) = self.stacks[space].pop()?;
        if self.stacks[space].is_empty() {
            self.spaces.remove(space);
        }
        Some((space, first, bins))
    }
}

/// A set of small integers with a successor search: a bit each, a bit for each of those 64-bit words that is not zero, and
/// one for each of those. Three steps up to 262,144; beyond, the words of the last level are walked.
struct Set {
    low: Vec<u64>,
    middle: Vec<u64>,
    high: Vec<u64>,
}

impl Set {
    /// For the integers 0..=max.
    fn new(max: usize) -> Set {
        let words = |bits: usize| vec![0; bits / 64 + 1];
        Set { low: words(max), middle: words(max / 64), high: words(max / 4096) }
    }

    #[inline]
    fn insert(&mut self, x: usize) {
        self.low[x / 64] |= 1 << (x % 64);
        self.middle[x / 4096] |= 1 << (x / 64 % 64);
        self.high[x / 262_144] |= 1 << (x / 4096 % 64);
    }

    #[inline]
    fn remove(&mut self, x: usize) {
        self.low[x / 64] &= !(1 << (x % 64));
        if self.low[x / 64] == 0 {
            self.middle[x / 4096] &= !(1 << (x / 64 % 64));
            if self.middle[x / 4096] == 0 {
                self.high[x / 262_144] &= !(1 << (x / 4096 % 64));
            }
        }
    }

    /// The smallest member that is at least `x`.
    #[inline]
    fn next(&self, x: usize) -> Option<usize> {
        if let Some(found) = within(&self.low, x) {
            return Some(found);
        }
        let word = match within(&self.middle, x / 64 + 1) {
            Some(word) => word,
            None => {
                let start = x / 4096 + 1;
                let rest = start / 64 + 1..self.high.len();
                let block = within(&self.high, start)
                    .or_else(|| rest.into_iter().find_map(|at| within(&self.high, at * 64)))?;
                block * 64 + self.middle[block].trailing_zeros() as usize
            }
        };
        Some(word * 64 + self.low[word].trailing_zeros() as usize)
    }
}

/// The first bit from `at` on, within its word.
#[inline]
fn within(words: &[u64], at: usize) -> Option<usize> {
    let word = words.get(at / 64)? & (!0u64 << (at % 64));
    (word != 0).then(|| at / 64 * 64 + word.trailing_zeros() as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::Random;
    use std::collections::BTreeSet;

    #[test]
    fn the_set_finds_successors() {
        for max in [1, 63, 64, 4096, 300_000] {
            let (mut set, mut truth, mut random) = (Set::new(max), BTreeSet::new(), Random::new(7, max as u64, 0));
            for _ in 0..2000 {
                let x = random.below(max + 1);
                if random.below(3) == 0 {
                    set.remove(x);
                    truth.remove(&x);
                } else if random.below(2) == 0 {
                    set.insert(x);
                    truth.insert(x);
                }
                let from = random.below(max + 1);
                assert_eq!(set.next(from), truth.range(from..).next().copied());
            }
        }
    }

    fn bins(packed: &Packed) -> Vec<Vec<u32>> {
        (0..packed.len()).map(|bin| packed.bin(bin).to_vec()).collect()
    }

    #[test]
    fn each_strategy_on_a_few_items() {
        let lengths = [3, 1, 5, 2, 2, 5, 4];
        let found = |packing| bins(&arrange(&lengths, 6, packing, None).expect("fits"));
        // 5 5 4 3 2 2 1, each into the fullest bin that holds it.
        assert_eq!(found(Packing::Bfd), [vec![2], vec![5], vec![6, 3], vec![0, 4, 1]]);
        // 3+1, 5, then 2 fills the first, 2+4 the third; 5.
        assert_eq!(found(Packing::Stream), [vec![0, 1, 3], vec![4, 6], vec![2], vec![5]]);
        assert_eq!(found(Packing::Sequential), [vec![0, 1], vec![2], vec![3, 4], vec![5], vec![6]]);
        assert_eq!(found(Packing::None).len(), 7);
        // 22 tokens want 4 bins: 5, 5, 4+2, 3+2+1.
        let even = found(Packing::Even);
        assert_eq!(even.len(), 4);
        assert!(even.iter().all(|bin| (4..=6).contains(&bin.iter().map(|item| lengths[*item as usize]).sum::<u32>())));
    }

    #[test]
    fn an_item_that_no_bin_can_hold_is_named() {
        for packing in [Packing::Stream, Packing::Bfd, Packing::Even, Packing::Sequential, Packing::None] {
            assert_eq!(arrange(&[3, 9], 8, packing, None), Err(Misfit { index: 1, length: 9 }));
            assert_eq!(arrange(&[3, 8, 0], 8, packing, Some((0, 0))), Err(Misfit { index: 2, length: 0 }));
            assert!(arrange(&[], 8, packing, Some((0, 0))).expect("fits").is_empty());
        }
    }
}
