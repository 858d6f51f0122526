//! A double-array trie over the bytes of a vocabulary.

/// No such node or token.
pub const NONE: u32 = u32::MAX;

/// Byte strings to values; one dependent load a byte.
pub struct Trie {
    /// Base in the low half, parent in the high half; on top whether a string ends here.
    units: Vec<u64>,
    values: Vec<u32>,
}

/// The bits of a parent.
const PARENT: u32 = u32::MAX >> 1;

/// The node at which every string starts.
pub const ROOT: u32 = 0;

impl Trie {
    /// From sorted, distinct, non-empty strings. O(bytes), about 50 ns a string.
    pub fn new(sorted: &[(&[u8], u32)]) -> Trie {
        let mut build = Build { units: Vec::new(), values: Vec::new(), free: Vec::new(), first: 0, last: NONE };
        build.grow();
        build.take(ROOT);
        let mut todo = vec![(ROOT, 0usize, 0usize, sorted.len())];
        let (mut labels, mut parts) = (Vec::new(), Vec::new());
        while let Some((node, depth, mut low, high)) = todo.pop() {
            if low < high && sorted[low].0.len() == depth {
                build.values[node as usize] = sorted[low].1;
                low += 1;
            }
            labels.clear();
            parts.clear();
            while low < high {
                let label = sorted[low].0[depth];
                let stop = low + sorted[low..high].partition_point(|(string, _)| string[depth] == label);
                labels.push(label);
                parts.push((low, stop));
                low = stop;
            }
            if labels.is_empty() {
                continue;
            }
            let base = build.place(&labels);
            build.units[node as usize] = build.units[node as usize] & !0xffff_ffff | u64::from(base);
            for (label, (low, stop)) in labels.iter().zip(&parts) {
                let child = base ^ u32::from(*label);
                build.take(child);
                build.units[child as usize] = u64::from(node) << 32;
                todo.push((child, depth + 1, *low, *stop));
            }
        }
        for (unit, value) in build.units.iter_mut().zip(&build.values) {
            *unit |= u64::from(*value != NONE) << 63;
        }
        Trie { units: build.units, values: build.values }
    }

    /// The node behind a byte, [`NONE`] where no string goes on so.
    #[inline(always)]
    pub fn step(&self, node: u32, byte: u8) -> u32 {
        let next = self.units[node as usize] as u32 ^ u32::from(byte);
        // The root is nobody's child, though its own slot names it as parent.
        if next != ROOT && self.units.get(next as usize).is_some_and(|unit| (unit >> 32) as u32 & PARENT == node) {
            next
        } else {
            NONE
        }
    }

    /// The value of a node, [`NONE`] where no string ends.
    #[inline(always)]
    pub fn value(&self, node: u32) -> u32 {
        self.values[node as usize]
    }

    /// The value of a whole string.
    pub fn get(&self, string: &[u8]) -> Option<u32> {
        let mut node = ROOT;
        for byte in string {
            node = self.step(node, *byte);
            if node == NONE {
                return None;
            }
        }
        Some(self.value(node)).filter(|value| *value != NONE)
    }

    /// The value of the longest string that a text starts with.
    #[inline(always)]
    pub fn longest(&self, text: &[u8]) -> u32 {
        self.longest_with_length(text).0
    }

    /// The same with its length.
    #[inline(always)]
    pub fn longest_with_length(&self, text: &[u8]) -> (u32, usize) {
        let (mut node, mut base, mut last, mut length) = (ROOT, self.units[ROOT as usize] as u32, NONE, 0);
        for (byte, read) in text.iter().zip(1..) {
            let next = base ^ u32::from(*byte);
            let Some(unit) = self.units.get(next as usize) else { break };
            if (unit >> 32) as u32 & PARENT != node || next == ROOT {
                break;
            }
            (node, base) = (next, *unit as u32);
            if unit >> 63 == 1 {
                (last, length) = (node, read);
            }
        }
        (if last == NONE { NONE } else { self.values[last as usize] }, length)
    }
}

/// Free slots are a doubly linked list in order of position.
struct Build {
    units: Vec<u64>,
    values: Vec<u32>,
    free: Vec<(u32, u32)>,
    first: u32,
    last: u32,
}

/// Slots of a parent that cannot be: a free slot is nobody's child.
const UNUSED: u64 = (NONE as u64) << 32;

impl Build {
    fn grow(&mut self) {
        let start = self.units.len() as u32;
        let end = start + 256;
        self.units.resize(end as usize, UNUSED);
        self.values.resize(end as usize, NONE);
        self.free.resize(end as usize, (NONE, NONE));
        for slot in start..end {
            self.free[slot as usize] = (if slot == start { self.last } else { slot - 1 }, slot + 1);
        }
        self.free[end as usize - 1].1 = NONE;
        if self.last != NONE {
            self.free[self.last as usize].1 = start;
        } else {
            self.first = start;
        }
        self.last = end - 1;
    }

    fn is_free(&self, slot: u32) -> bool {
        self.units[slot as usize] == UNUSED
    }

    fn take(&mut self, slot: u32) {
        let (before, after) = self.free[slot as usize];
        match before {
            NONE => self.first = after,
            _ => self.free[before as usize].1 = after,
        }
        match after {
            NONE => self.last = before,
            _ => self.free[after as usize].0 = before,
        }
        // The root's parent is itself; the caller overwrites that of others.
        self.units[slot as usize] = 0;
    }

    /// A base whose slots for all labels are free.
    fn place(&mut self, labels: &[u8]) -> u32 {
        // Old holes fit few labels: after some tries a new block is cheaper than a search. The tail is emptiest.
        const TRIES: usize = 32;
        for from_head in [true, false] {
            let mut slot = if from_head { self.first } else { self.last };
            for _ in 0..TRIES {
                if slot == NONE {
                    break;
                }
                let base = slot ^ u32::from(labels[0]);
                if labels.iter().all(|label| self.is_free(base ^ u32::from(*label))) {
                    return base;
                }
                let (before, after) = self.free[slot as usize];
                slot = if from_head { after } else { before };
            }
        }
        let base = self.units.len() as u32;
        self.grow();
        base
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_finds_what_a_sorted_list_holds_and_nothing_else() {
        let mut strings: Vec<Vec<u8>> = Vec::new();
        let mut seed = 1u64;
        for _ in 0..4000 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let length = 1 + (seed >> 60) as usize % 7;
            strings.push((0..length).map(|i| (seed >> (8 * i)) as u8 & if i < 2 { 0xff } else { 3 }).collect());
        }
        strings.sort();
        strings.dedup();
        let list: Vec<(&[u8], u32)> =
            strings.iter().zip(0..).map(|(string, value)| (string.as_slice(), value)).collect();
        let trie = Trie::new(&list);
        for (string, value) in &list {
            assert_eq!(trie.get(string), Some(*value));
            let mut longer = string.to_vec();
            longer.push(77);
            let wanted = strings.binary_search(&longer).ok().map(|found| found as u32);
            assert_eq!(trie.get(&longer), wanted);
            let longest = (1..=longer.len()).rev().find_map(|end| strings.binary_search(&longer[..end].to_vec()).ok());
            assert_eq!(trie.longest(&longer), longest.map_or(NONE, |found| found as u32));
        }
        assert_eq!(trie.get(&[0, 0, 0, 0, 0, 0, 0, 0, 0]), None);
    }
}
