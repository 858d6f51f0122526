//! Lengths -> bins of at most `capacity` tokens. No limit on the items of a bin.

/// An item longer than a bin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLong {
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

impl Packed {
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

    /// The same bins in another order.
    pub fn reordered(&self, order: &[u32]) -> Packed {
        let (mut items, mut offsets) = (Vec::with_capacity(self.items.len()), Vec::with_capacity(order.len() + 1));
        offsets.push(0);
        for bin in order {
            items.extend_from_slice(self.bin(*bin as usize));
            offsets.push(items.len() as u32);
        }
        Packed { items, offsets }
    }

    /// From the bin of each item and the number of items of each bin; items keep their order within a bin.
    fn from_bins(bin_of: &[u32], counts: &[u32]) -> Packed {
        let offsets = offsets_of(counts);
        let mut at = offsets.clone();
        let mut items = vec![0; bin_of.len()];
        for (item, bin) in bin_of.iter().enumerate() {
            let place = &mut at[*bin as usize];
            items[*place as usize] = item as u32;
            *place += 1;
        }
        Packed { items, offsets }
    }
}

fn offsets_of(counts: &[u32]) -> Vec<u32> {
    let mut offsets = Vec::with_capacity(counts.len() + 1);
    let mut sum = 0;
    offsets.push(0);
    for count in counts {
        sum += count;
        offsets.push(sum);
    }
    offsets
}

fn check(lengths: &[u32], capacity: u32) -> Result<(), TooLong> {
    match lengths.iter().position(|length| *length > capacity) {
        Some(index) => Err(TooLong { index, length: lengths[index] }),
        None => Ok(()),
    }
}

/// Every item a bin of its own.
pub fn singles(lengths: &[u32]) -> Packed {
    let n = lengths.len() as u32;
    Packed { items: (0..n).collect(), offsets: (0..=n).collect() }
}

/// Best fit in the given order with at most `open` bins open: each item into the fullest open bin that still holds it,
/// the one waiting longest among equals; when there are too many, the fullest is closed.
/// Bins are in the order in which they were opened. O(n), and memory for `open` bins beside the result.
///
/// # Errors
/// [`TooLong`] for the first item longer than `capacity`.
pub fn best_fit_stream(lengths: &[u32], capacity: u32, open: usize) -> Result<Packed, TooLong> {
    check(lengths, capacity)?;
    let mut spaces = Set::new(capacity as usize);
    let mut queues = Queues::new(capacity as usize, open + 1);
    let mut free: Vec<u32> = (0..=open as u32).rev().collect();
    let mut bin_of_slot = vec![0u32; open + 1];
    let (mut bin_of, mut counts): (Vec<u32>, Vec<u32>) = (Vec::with_capacity(lengths.len()), Vec::new());
    let mut live = 0;
    for length in lengths {
        let length = *length as usize;
        let (space, slot) = match spaces.next(length).and_then(|space| Some((space, queues.pop(space, &mut spaces)?))) {
            Some((space, slot)) => {
                live -= 1;
                (space, slot)
            }
            None => {
                // At most `open` bins are live here, so one of the `open + 1` slots is free.
                let slot = free.pop().unwrap_or_default();
                bin_of_slot[slot as usize] = counts.len() as u32;
                counts.push(0);
                (capacity as usize, slot)
            }
        };
        let bin = bin_of_slot[slot as usize];
        bin_of.push(bin);
        counts[bin as usize] += 1;
        if space == length {
            free.push(slot);
            continue;
        }
        queues.push(space - length, slot, &mut spaces);
        live += 1;
        if live > open
            && let Some(slot) = spaces.next(0).and_then(|fullest| queues.pop(fullest, &mut spaces))
        {
            live -= 1;
            free.push(slot);
        }
    }
    Ok(Packed::from_bins(&bin_of, &counts))
}

/// Best-fit decreasing: longest item first, each into the fullest bin that still holds it.
/// Ties keep input order, so the same lengths give the same bins on every machine. Runs of equal items are placed on
/// groups of equal bins at once: O(n + groups).
///
/// # Errors
/// [`TooLong`] for the first item longer than `capacity`.
pub fn best_fit_decreasing(lengths: &[u32], capacity: u32) -> Result<Packed, TooLong> {
    check(lengths, capacity)?;
    let (sorted, starts) = longest_first(lengths, capacity as usize);
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
    Ok(lay_out(&sorted, &placed, bins))
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
    let offsets = offsets_of(&counts);
    let mut place = offsets.clone();
    let mut items = vec![0; sorted.len()];
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
fn longest_first(lengths: &[u32], capacity: usize) -> (Vec<u32>, Vec<u32>) {
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
    let mut sorted = vec![0; lengths.len()];
    for (item, length) in lengths.iter().enumerate() {
        let at = &mut place[*length as usize];
        sorted[*at as usize] = item as u32;
        *at += 1;
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

const NONE: u32 = u32::MAX;

/// A first-in-first-out queue of slots for each free space, in three arrays.
struct Queues {
    head: Vec<u32>,
    tail: Vec<u32>,
    next: Vec<u32>,
}

impl Queues {
    fn new(capacity: usize, slots: usize) -> Queues {
        Queues { head: vec![NONE; capacity + 1], tail: vec![NONE; capacity + 1], next: vec![NONE; slots] }
    }

    fn push(&mut self, space: usize, slot: u32, spaces: &mut Set) {
        self.next[slot as usize] = NONE;
        if self.head[space] == NONE {
            spaces.insert(space);
            self.head[space] = slot;
        } else {
            self.next[self.tail[space] as usize] = slot;
        }
        self.tail[space] = slot;
    }

    fn pop(&mut self, space: usize, spaces: &mut Set) -> Option<u32> {
        let slot = self.head[space];
        if slot == NONE {
            return None;
        }
        self.head[space] = self.next[slot as usize];
        if self.head[space] == NONE {
            spaces.remove(space);
        }
        Some(slot)
    }
}

/// A set of small integers with a successor search: levels of 64-bit words, each bit of a level a word of the one below.
struct Set {
    levels: Vec<Vec<u64>>,
}

impl Set {
    /// For the integers 0..=max.
    fn new(max: usize) -> Set {
        let (mut levels, mut words) = (Vec::new(), max / 64 + 1);
        levels.push(vec![0; words]);
        while words > 1 {
            words = words.div_ceil(64);
            levels.push(vec![0; words]);
        }
        Set { levels }
    }

    fn insert(&mut self, x: usize) {
        let mut x = x;
        for level in &mut self.levels {
            level[x / 64] |= 1 << (x % 64);
            x /= 64;
        }
    }

    fn remove(&mut self, x: usize) {
        let mut x = x;
        for level in &mut self.levels {
            level[x / 64] &= !(1 << (x % 64));
            if level[x / 64] != 0 {
                break;
            }
            x /= 64;
        }
    }

    /// The smallest member that is at least `x`.
    fn next(&self, x: usize) -> Option<usize> {
        let mut x = x;
        for (height, level) in self.levels.iter().enumerate() {
            let word = level.get(x / 64)? & (!0u64 << (x % 64));
            if word != 0 {
                let mut found = x / 64 * 64 + word.trailing_zeros() as usize;
                for below in self.levels[..height].iter().rev() {
                    found = found * 64 + below[found].trailing_zeros() as usize;
                }
                return Some(found);
            }
            x = x / 64 + 1;
        }
        None
    }
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

    #[test]
    fn best_fit_decreasing_places_item_by_item() {
        let packed = best_fit_decreasing(&[3, 1, 5, 2, 2, 5, 4], 6).expect("fits");
        let bins: Vec<&[u32]> = (0..packed.len()).map(|bin| packed.bin(bin)).collect();
        // 5 5 4 3 2 2 1: [5 1], [5], [4 2], [3 2]
        assert_eq!(bins.len(), 4);
        let mut seen: Vec<u32> = packed.items.clone();
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn an_item_longer_than_a_bin_is_named() {
        let error = TooLong { index: 1, length: 9 };
        assert_eq!(best_fit_stream(&[3, 9], 8, 4), Err(error));
        assert_eq!(best_fit_decreasing(&[3, 9], 8), Err(error));
    }

    #[test]
    fn nothing_gives_no_bins() {
        assert!(best_fit_stream(&[], 8, 4).expect("fits").is_empty());
        assert!(best_fit_decreasing(&[], 8).expect("fits").is_empty());
    }
}
