//! Merging pieces side by side.
//!
//! BPE as defined, for pieces of few symbols: O(n^2) in their number, but all that a pick costs is two look-ups in the
//! table of pairs. That table is larger than a second-level cache, and each pick waits for the one before it; so many
//! pieces take their picks in turns, and memory answers one while the others go on.

use super::bpe::Bpe;
use super::masks::Simd;
use super::memory::prefetch;
use super::pairs::{self, FIRST, NOBODY, Pairs};
use super::trie::NONE;

/// Places of a piece: symbols stand from 1 on with [`NOBODY`] at either end. Below 2^5, see [`pick`].
const ROOM: usize = 32;
/// How many symbols at most are merged so.
pub const PICKED: usize = ROOM - 2;
/// Pieces that take turns.
const TURNS: usize = 24;

/// A piece.
#[derive(Default)]
struct Job {
    symbols: [u32; ROOM],
    /// Product and place of each pair that merges; in between the slots to be read.
    picks: [u32; ROOM],
    /// Places that hold a symbol or the ends.
    alive: u32,
    count: usize,
    /// Whether all symbols are below [`FIRST`].
    plain: bool,
    /// The two pairs of the last pick: place, slot, key.
    asked: [(usize, u32, u64); 2],
}

/// Pieces that wait for their merges.
#[derive(Default)]
pub struct Rounds {
    /// As many as ever waited; those of now are the first so many.
    jobs: Vec<Job>,
    waiting: usize,
}

/// Product << 5 | place of the left one: the least is the next pick, the leftmost of equals.
#[inline(always)]
fn pick(product: u32, at: usize) -> u32 {
    if product == NONE { NONE } else { product << 5 | at as u32 }
}

impl Rounds {
    /// Forgets all pieces.
    pub fn clear(&mut self) {
        self.waiting = 0;
    }

    /// Adds a piece, and gives its number; none where it has too many symbols or one that is none.
    pub fn add(&mut self, bpe: &Bpe, piece: &[u8]) -> Option<usize> {
        if self.waiting == self.jobs.len() {
            self.jobs.push(Job::default());
        }
        // In place: moving one takes as long as a merge.
        let job = &mut self.jobs[self.waiting];
        job.symbols = [NOBODY; ROOM];
        job.picks = [NONE; ROOM];
        job.count = bpe.symbols(piece, &mut job.symbols[1..=PICKED])?;
        job.alive = ((2u64 << (job.count + 1)) - 1) as u32;
        job.plain = job.symbols[1..=job.count].iter().all(|symbol| *symbol < FIRST);
        self.waiting += 1;
        Some(self.waiting - 1)
    }

    /// Merges all.
    pub fn run(&mut self, bpe: &Bpe, simd: Simd) {
        match simd {
            // SAFETY: [`Simd::all`] gives them only where the processor has these.
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 | Simd::Avx512 => unsafe { self.run_avx2(bpe) },
            _ => self.run_any(bpe),
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt")]
    fn run_avx2(&mut self, bpe: &Bpe) {
        self.run_any(bpe);
    }

    #[inline(always)]
    fn run_any(&mut self, bpe: &Bpe) {
        let pairs = bpe.pairs();
        for jobs in self.jobs[..self.waiting].chunks_mut(TURNS) {
            for job in jobs.iter_mut().filter(|job| !job.plain) {
                for at in 1..job.count {
                    let slot = pairs.slot(pairs::key(job.symbols[at], job.symbols[at + 1]));
                    pairs.prefetch(slot);
                    job.picks[at] = slot;
                }
            }
            let (mut active, mut left) = ([0u8; TURNS], 0);
            for (index, job) in jobs.iter_mut().enumerate() {
                for at in 1..job.count {
                    let (left, right) = (job.symbols[at], job.symbols[at + 1]);
                    let product = if job.plain {
                        pairs.first(left, right)
                    } else {
                        pairs.read(job.picks[at], pairs::key(left, right))
                    };
                    job.picks[at] = pick(product, at);
                }
                active[index] = index as u8;
                left += 1;
            }
            while left > 0 {
                let mut index = 0;
                while index < left {
                    if jobs[usize::from(active[index])].ask(pairs) {
                        index += 1;
                    } else {
                        jobs[usize::from(active[index])].symbols().for_each(|symbol| prefetch(&bpe.ids()[symbol]));
                        left -= 1;
                        active[index] = active[left];
                    }
                }
                for index in &active[..left] {
                    jobs[usize::from(*index)].answer(pairs);
                }
            }
        }
    }

    /// Appends the ids of a piece.
    pub fn ids(&self, index: usize, bpe: &Bpe, ids: &mut Vec<u32>) {
        ids.extend(self.jobs[index].symbols().map(|symbol| bpe.ids()[symbol]));
    }
}

impl Job {
    /// What it has become.
    #[inline(always)]
    fn symbols(&self) -> impl Iterator<Item = usize> {
        let mut rest = self.alive & !1 & !(1 << (self.count + 1));
        std::iter::from_fn(move || {
            let place = (rest != 0).then_some(rest.trailing_zeros() as usize & (ROOM - 1))?;
            rest &= rest - 1;
            Some(self.symbols[place] as usize)
        })
    }

    /// Merges the next pick and asks for its new pairs; false where there is none.
    #[inline(always)]
    fn ask(&mut self, pairs: &Pairs) -> bool {
        let best = self.picks.iter().fold(NONE, |best, pick| best.min(*pick));
        if best == NONE {
            return false;
        }
        let (product, at) = (best >> 5, best as usize & (ROOM - 1));
        let behind = self.alive & u32::MAX << at << 1;
        let right = behind.trailing_zeros() as usize & (ROOM - 1);
        let next = (behind & behind.wrapping_sub(1)).trailing_zeros() as usize & (ROOM - 1);
        let before = 31 - (self.alive & ((1 << at) - 1) | 1).leading_zeros() as usize;
        self.alive &= !(1 << right);
        self.symbols[at] = product;
        self.picks[right] = NONE;
        let ask = |place: usize, key: u64| {
            let slot = pairs.slot(key);
            pairs.prefetch(slot);
            (place, slot, key)
        };
        self.asked = [
            ask(at, pairs::key(product, self.symbols[next])),
            ask(before, pairs::key(self.symbols[before & (ROOM - 1)], product)),
        ];
        true
    }

    #[inline(always)]
    fn answer(&mut self, pairs: &Pairs) {
        for (place, slot, key) in self.asked {
            self.picks[place & (ROOM - 1)] = pick(pairs.read(slot, key), place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::bpe::{Memo, Unit};
    use crate::tokenizer::model::Plan;

    #[test]
    fn pieces_merged_side_by_side_become_what_the_search_finds() {
        let mut seed = 3u64;
        let mut below = |most: usize| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) as usize % most
        };
        for _ in 0..20 {
            let mut tokens: Vec<String> = ["a", "b", "c"].map(String::from).to_vec();
            let mut merges = Vec::new();
            while tokens.len() < 40 {
                let (left, right) = (tokens[below(tokens.len())].clone(), tokens[below(tokens.len())].clone());
                let joined = format!("{left}{right}");
                if joined.len() < 9 && !tokens.contains(&joined) {
                    merges.push([left, right]);
                    tokens.push(joined);
                }
            }
            let vocab: serde_json::Map<String, serde_json::Value> =
                tokens.iter().enumerate().map(|(id, token)| (token.clone(), id.into())).collect();
            let file = serde_json::json!({
                "model": {"type": "BPE", "vocab": vocab, "merges": merges},
                "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
            });
            let file = file.to_string();
            let plan = Plan::read(&file).expect("a plan");
            let bpe = Bpe::new(&plan.model, Unit::Byte, 1, |_| ()).expect("merges").0;
            let pieces: Vec<String> = (0..3 * TURNS + 1)
                .map(|_| (0..1 + below(PICKED)).map(|_| ["a", "b", "c"][below(3)]).collect())
                .collect();
            for simd in Simd::all() {
                let mut rounds = Rounds::default();
                for piece in &pieces {
                    rounds.add(&bpe, piece.as_bytes()).expect("few symbols");
                }
                rounds.run(&bpe, simd);
                for (index, piece) in pieces.iter().enumerate() {
                    let (mut given, mut wanted) = (Vec::new(), Vec::new());
                    rounds.ids(index, &bpe, &mut given);
                    bpe.encode(piece.as_bytes(), &mut Memo::default(), &mut wanted);
                    assert_eq!(given, wanted, "{piece} {merges:?} {simd:?}");
                }
            }
            assert_eq!(Rounds::default().add(&bpe, "a".repeat(PICKED + 1).as_bytes()), None);
            assert_eq!(Rounds::default().add(&bpe, b"ax"), None);
        }
    }
}
