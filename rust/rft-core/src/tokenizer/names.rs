//! Ids of tokens by their text, while a tokenizer is loaded.

use std::borrow::Cow;
use std::hash::Hasher;

use super::bpe::Fold;
use super::memory::{Table, prefetch};

/// The tokens of a vocabulary. Merges name half a million, and no cache holds the table, the entries or their texts: look-ups
/// are made many at a time, so that memory answers one while others are asked.
pub struct Names<'a> {
    vocab: &'a [(Cow<'a, str>, u32)],
    /// Half of a hash, above the place of a token in the vocabulary, counted from 1; 0 where free.
    slots: Table<u64>,
}

/// How far ahead memory is asked when tokens are added.
const AHEAD: usize = 24;

fn hash(text: &str) -> u64 {
    let mut fold = Fold::default();
    fold.write(text.as_bytes());
    fold.finish()
}

impl<'a> Names<'a> {
    /// Of a vocabulary; none where it names a token twice.
    pub fn new(vocab: &'a [(Cow<'a, str>, u32)]) -> Option<Names<'a>> {
        let slots = Table::new((vocab.len() * 2).next_power_of_two().max(2));
        let mut names = Names { vocab, slots };
        let hashes: Vec<u64> = vocab.iter().map(|(token, _)| hash(token)).collect();
        for (at, own) in hashes.iter().enumerate() {
            if let Some(next) = hashes.get(at + AHEAD) {
                names.slots.prefetch(names.slots.slot(*next));
            }
            let mut slot = names.slots.slot(*own);
            while *names.slots.at(slot) != 0 {
                if names.holds(slot, *own, &vocab[at].0).is_some() {
                    return None;
                }
                slot = names.slots.next(slot);
            }
            *names.slots.at_mut(slot) = own << 32 | (at as u64 + 1);
        }
        Some(names)
    }

    /// The token at a slot.
    fn entry(&self, slot: usize) -> Option<&'a (Cow<'a, str>, u32)> {
        self.vocab.get((*self.slots.at(slot) as u32).wrapping_sub(1) as usize)
    }

    /// The id at a slot, if it is that of a text.
    fn holds(&self, slot: usize, hash: u64, text: &str) -> Option<u32> {
        let (token, id) = self.entry(slot).filter(|_| *self.slots.at(slot) >> 32 == hash & 0xffff_ffff)?;
        (token == text).then_some(*id)
    }

    fn find(&self, hash: u64, text: &str) -> Option<u32> {
        let mut slot = self.slots.slot(hash);
        while *self.slots.at(slot) != 0 {
            if let Some(id) = self.holds(slot, hash, text) {
                return Some(id);
            }
            slot = self.slots.next(slot);
        }
        None
    }

    /// The id of a token.
    pub fn get(&self, text: &str) -> Option<u32> {
        self.find(hash(text), text)
    }

    /// The ids of several.
    pub fn get_all<const N: usize>(&self, texts: [&str; N]) -> [Option<u32>; N] {
        let hashes = texts.map(hash);
        let slots = hashes.map(|hash| self.slots.slot(hash));
        slots.iter().for_each(|slot| self.slots.prefetch(*slot));
        let entries = slots.map(|slot| self.entry(slot));
        entries.iter().flatten().for_each(|entry| prefetch(*entry));
        entries.iter().flatten().filter_map(|(token, _)| token.as_bytes().first()).for_each(prefetch);
        std::array::from_fn(|at| self.find(hashes[at], texts[at]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_found_one_by_one_and_together_and_none_may_stand_twice() {
        let mut vocab: Vec<(Cow<'_, str>, u32)> =
            (0..3000u32).map(|id| (format!("{}{id}", "x".repeat(id as usize % 20)).into(), id * 7)).collect();
        let names = Names::new(&vocab).expect("no token twice");
        for (token, id) in &vocab {
            assert_eq!(names.get(token), Some(*id));
            assert_eq!(names.get_all([token, "absent", token]), [Some(*id), None, Some(*id)]);
        }
        assert_eq!(Names::new(&[]).expect("nothing twice").get(""), None);
        vocab.push(vocab[1234].clone());
        assert!(Names::new(&vocab).is_none());
    }
}
