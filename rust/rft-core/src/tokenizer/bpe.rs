//! Byte-pair merges: what one piece of text becomes.
//!
//! BPE picks, over and over, the pair of neighbours with the lowest rank, the leftmost first. Two facts follow, and the
//! engine rests on them:
//!
//! 1. *Pieces of a result are results.* If BPE turns a text into tokens t1..tn, it turns the text of any ti..tj into
//!    ti..tj: no merge crosses the ends of that stretch, so the picks inside it are the same, in the same order.
//! 2. *Valid pairs make a valid whole.* If BPE turns the text of every ti t(i+1) into just those two, it turns the
//!    whole into t1..tn: take the first pick that crosses a border. Until then all picks lay inside tokens, so those
//!    inside ti t(i+1) were also the picks of that pair alone, which would now cross the border too.
//!
//! So the result is the only sequence of tokens whose neighbours are valid, and it can be searched from the left: the
//! longest token first, shorter ones where the pair with the one before is not valid, and back by one token where none
//! fits. A position that failed once is never tried again, so this is linear in the length of the text (times the
//! longest chain of prefixes), where picking pairs is not.
//!
//! It also follows that one pair at most can be the last merge of a token: the last pick of BPE on the token's own
//! text. Merges that no text can reach are left out; that leaves one rank a token, and tokens are numbered by it
//! inside, so that a pair's entry is 64 bits: left, right and product.

use std::borrow::Cow;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::Side;
use super::model::{Model, SPACE_MARK};
use super::names::Names;
use super::pairs::{self, Growing, MAX_TOKENS, Pairs};
use super::trie::{NONE, Trie};

/// A fast hasher for keys that come from a file, not from an attacker.
#[derive(Default)]
pub struct Fold(u64);

impl Hasher for Fold {
    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 32
    }
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }
    fn write_u8(&mut self, value: u8) {
        self.write_u64(u64::from(value));
    }
    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }
    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0.rotate_left(5) ^ value).wrapping_mul(0x517c_c1b7_2722_0a95);
    }
}

/// A hash map with [`Fold`].
pub type FoldMap<K, V> = HashMap<K, V, BuildHasherDefault<Fold>>;

/// What the smallest parts of a text are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes (GPT-2's byte level).
    Byte,
    /// Characters, with bytes for those that the vocabulary lacks (SentencePiece).
    Char,
}

/// Merges, ready for text. Tokens have inside numbers: units first, then products by the rank of their merge.
pub struct Bpe {
    unit: Unit,
    /// Inside number to id.
    ids: Vec<u32>,
    /// The two parts of each product; of a unit, itself.
    parts: Vec<(u32, u32)>,
    lengths: Vec<u32>,
    units: u32,
    /// Inside number of each single byte, [`NONE`] where the vocabulary lacks it.
    bytes: [u32; 256],
    /// Ids of the bytes of characters that the vocabulary lacks ([`Unit::Char`]).
    fallback: [u32; 256],
    /// The token that each character below U+10000 may stand for before any merge; see [`Bpe::whole_chars`].
    chars: Vec<u32>,
    pairs: Pairs,
    trie: Trie,
    /// The longest shorter token that each token starts with.
    shorter: Vec<u32>,
    /// With `ignore_merges`, the entries that merges do not reach; the others come out as themselves anyway.
    whole: FoldMap<Vec<u8>, u32>,
    /// Whether all parts of each product have lower numbers, which [`Bpe::walk`] needs.
    monotone: bool,
    /// Bytes of each token by id, 0 where unknown.
    widths: Vec<u16>,
    /// Texts of the tokens, one behind the other, and where each ends; 0 first.
    texts: Vec<u8>,
    ends: Vec<u32>,
}

/// Remembered answers of [`Bpe::is_valid`], and room for the search.
pub struct Memo {
    answers: Vec<u64>,
    stack: Vec<u32>,
    dead: Vec<u64>,
    symbols: Vec<u32>,
    ranks: Vec<u32>,
}

const MEMO_BITS: u32 = 16;

impl Default for Memo {
    fn default() -> Memo {
        Memo {
            answers: vec![u64::MAX; 1 << MEMO_BITS],
            stack: Vec::new(),
            dead: Vec::new(),
            symbols: Vec::new(),
            ranks: Vec::new(),
        }
    }
}

/// GPT-2's letters for bytes: by code point, the byte.
fn letters() -> [Option<u8>; 324] {
    let (mut bytes, mut spare) = ([None; 324], 256);
    for byte in 0..=255u8 {
        match byte {
            33..=126 | 161..=172 | 174..=255 => bytes[usize::from(byte)] = Some(byte),
            _ => {
                bytes[spare] = Some(byte);
                spare += 1;
            }
        }
    }
    bytes
}

/// GPT-2's letter of each byte.
pub fn letters_of_bytes() -> [char; 256] {
    let mut all = ['\0'; 256];
    for (code, byte) in (0u32..).zip(letters()) {
        if let Some(byte) = byte {
            all[usize::from(byte)] = char::from_u32(code).unwrap_or_default();
        }
    }
    all
}

/// Tokens as bytes, one behind the other.
#[derive(Default)]
struct Texts {
    bytes: Vec<u8>,
    ranges: Vec<(u32, u32)>,
}

impl Texts {
    /// The text of an id; empty where it has none.
    fn get(&self, id: u32) -> &[u8] {
        let (start, end) = self.ranges[id as usize];
        &self.bytes[start as usize..end as usize]
    }
}

/// The merges of a file, as ids.
struct Merge {
    left: u32,
    right: u32,
    product: u32,
}

impl Bpe {
    /// From a model; else why it cannot be. `meanwhile` is called with all but what searches need, which a second thread makes.
    pub fn new<T>(
        model: &Model<'_>,
        unit: Unit,
        threads: usize,
        meanwhile: impl FnOnce(&Bpe) -> T,
    ) -> Result<(Bpe, T), String> {
        let vocab = &model.vocab.0;
        let top = vocab.iter().map(|(_, id)| *id as usize + 1).max().unwrap_or(0);
        if top > MAX_TOKENS {
            return Err(format!("its vocabulary has ids above {MAX_TOKENS}"));
        }
        let names = Names::new(vocab).ok_or("its vocabulary names a token twice")?;
        let (texts, merges) = std::thread::scope(|scope| {
            let texts = Side::new(scope, threads, || texts_of(vocab, top, unit));
            let all = model.merges.0.as_slice();
            // The texts take a thread about as long as a third of the merges.
            let (first, second) = all.split_at(if threads > 1 { all.len() * 2 / 3 } else { all.len() });
            let more = Side::new(scope, threads, || merges_of(second, first.len(), &names));
            let merges = merges_of(first, 0, &names).and_then(|mut merges| {
                merges.append(&mut more.get()?);
                Ok(merges)
            });
            (texts.get(), merges)
        });
        let (texts, merges) = (texts?, merges?);
        let (mut bpe, mut pairs) = (Bpe::units(unit, &texts), Growing::new(top));
        if !bpe.number_in_order(&merges, &texts, &mut pairs) {
            (bpe, pairs) = (Bpe::units(unit, &texts), Growing::new(top));
            bpe.number_by_running(&merges, &texts, &mut pairs)?;
        }
        let numbered = bpe.ids.clone();
        std::thread::scope(|scope| {
            let search = Side::new(scope, threads, || searched(&numbered, &texts));
            bpe.pairs = pairs.fixed();
            bpe.finish(&texts, &names, model.ignore_merges)?;
            let made = meanwhile(&bpe);
            (bpe.trie, bpe.shorter) = search.get();
            Ok((bpe, made))
        })
    }

    /// Only units, no merges.
    fn units(unit: Unit, texts: &Texts) -> Bpe {
        let mut ids: Vec<u32> = (0..texts.ranges.len() as u32).filter(|id| is_unit(unit, texts.get(*id))).collect();
        ids.sort_unstable();
        let units = ids.len() as u32;
        let mut bytes = [NONE; 256];
        for (id, number) in ids.iter().zip(0..) {
            if let [byte] = texts.get(*id) {
                bytes[usize::from(*byte)] = number;
            }
        }
        Bpe {
            unit,
            parts: (0..units).map(|unit| (unit, unit)).collect(),
            ids,
            lengths: Vec::new(),
            units,
            bytes,
            fallback: [NONE; 256],
            chars: Vec::new(),
            pairs: Growing::new(0).fixed(),
            trie: Trie::new(&[]),
            shorter: Vec::new(),
            whole: FoldMap::default(),
            monotone: true,
            widths: Vec::new(),
            texts: Vec::new(),
            ends: Vec::new(),
        }
    }

    /// Numbers the products that merges can reach, by rank, where every part is made before what it is a part of.
    /// A merge is reachable where the pair of its parts is valid under the merges before it. False where the file is
    /// not so: where the parts of a merge that still waits for its product were made after it.
    fn number_in_order(&mut self, merges: &[Merge], texts: &Texts, pairs: &mut Growing) -> bool {
        let mut inside = vec![NONE; texts.ranges.len()];
        for (id, number) in self.ids.iter().zip(0..) {
            inside[*id as usize] = number;
        }
        let mut waiting = Vec::new();
        for merge in merges {
            let (left, right) = (inside[merge.left as usize], inside[merge.right as usize]);
            if left == NONE || right == NONE {
                waiting.push(merge);
                continue;
            }
            if inside[merge.product as usize] != NONE {
                // A token has one last merge at most. A unit has none: its own text is one symbol.
                if inside[merge.product as usize] < self.units {
                    return false;
                }
                continue;
            }
            if pairs.get(left, right) != NONE {
                // The library lets the later rank of a pair that stands twice count.
                return false;
            }
            if texts.get(merge.product).is_empty() || !self.walk(left, right, |left, right| pairs.get(left, right)) {
                continue;
            }
            let number = self.ids.len() as u32;
            inside[merge.product as usize] = number;
            self.ids.push(merge.product);
            self.parts.push((left, right));
            pairs.put(left, right, number);
        }
        waiting.iter().all(|merge| {
            let made = |id: u32| inside[id as usize] != NONE;
            !made(merge.left) || !made(merge.right) || made(merge.product)
        })
    }

    /// The same for any file, by running BPE on the text of each product.
    fn number_by_running(&mut self, merges: &[Merge], texts: &Texts, pairs: &mut Growing) -> Result<(), String> {
        let ranks_of: FoldMap<(u32, u32), (u32, u32)> =
            merges.iter().zip(0..).map(|(merge, rank)| ((merge.left, merge.right), (rank, merge.product))).collect();
        let mut products: Vec<u32> = merges.iter().map(|merge| merge.product).collect();
        products.sort_unstable();
        products.dedup();
        let units: FoldMap<&[u8], u32> = self.ids.iter().map(|id| (texts.get(*id), *id)).collect();
        let mut made: Vec<(u32, u32, u32, u32)> = Vec::with_capacity(products.len());
        let (mut symbols, mut ranks) = (Vec::new(), Vec::new());
        for product in products {
            let text = texts.get(product);
            if is_unit(self.unit, text) {
                return Err("its merges make a single character".to_string());
            }
            if text.is_empty() || !split_units(self.unit, text, &units, &mut symbols) {
                continue;
            }
            if let Some((left, right, rank)) = last_merge(&ranks_of, &mut symbols, &mut ranks) {
                made.push((rank, left, right, product));
            }
        }
        made.sort_unstable();
        let mut inside = vec![NONE; texts.ranges.len()];
        for (id, number) in self.ids.iter().chain(made.iter().map(|(_, _, _, product)| product)).zip(0..) {
            inside[*id as usize] = number;
        }
        for (_, left, right, product) in made {
            let (left, right) = (inside[left as usize], inside[right as usize]);
            let number = self.ids.len() as u32;
            self.monotone &= left < number && right < number;
            self.ids.push(product);
            self.parts.push((left, right));
            pairs.put(left, right, number);
        }
        Ok(())
    }

    fn finish(&mut self, texts: &Texts, names: &Names<'_>, ignore_merges: bool) -> Result<(), String> {
        self.lengths = self.ids.iter().map(|id| texts.get(*id).len() as u32).collect();
        self.ends.push(0);
        for id in &self.ids {
            self.texts.extend_from_slice(texts.get(*id));
            self.ends.push(self.texts.len() as u32);
        }
        self.widths = texts.ranges.iter().map(|(start, end)| (end - start) as u16).collect();
        self.chars = self.whole_chars(texts);
        let mut reachable = vec![false; texts.ranges.len()];
        for id in &self.ids {
            reachable[*id as usize] = true;
        }
        if self.unit == Unit::Char {
            for byte in 0..=255u8 {
                let name = format!("<0x{byte:02X}>");
                let id = names.get(&name).ok_or_else(|| format!("its vocabulary lacks {name}"))?;
                // Such a token must come from its byte alone, not from merges of its spelling.
                if reachable[id as usize] {
                    return Err(format!("its merges make {name}"));
                }
                self.fallback[usize::from(byte)] = id;
                self.widths[id as usize] = 1;
            }
        } else if ignore_merges {
            let rest = (0..texts.ranges.len() as u32).filter(|id| !reachable[*id as usize]);
            self.whole = rest.map(|id| (texts.get(id).to_vec(), id)).filter(|(text, _)| !text.is_empty()).collect();
        }
        Ok(())
    }

    /// Characters that are one token whatever stands beside them, unless that whole token is merged further: merging may
    /// start from these in place of bytes.
    ///
    /// A character is so if its last merge comes before any merge that joins a part of it with a neighbour. Then, as
    /// long as it is not complete, a pick inside it comes before any across its border. Needs numbers that are times.
    fn whole_chars(&self, texts: &Texts) -> Vec<u32> {
        let mut chars = vec![NONE; 1 << 16];
        let text_of = |token: u32| texts.get(self.ids[token as usize]);
        // The first merge across a border of characters, by the part of a character that takes part in it.
        let mut crossing: FoldMap<&[u8], u32> = FoldMap::default();
        if self.unit == Unit::Byte {
            for (product, (left, right)) in (self.units..).zip(&self.parts[self.units as usize..]) {
                let (left, right) = (text_of(*left), text_of(*right));
                let inner = |byte: &u8| (0x80..0xc0).contains(byte);
                if inner(&right[0]) {
                    continue;
                }
                let starts = match right[0] {
                    0xc0..0xe0 => right.len() < 2,
                    0xe0..0xf0 => right.len() < 3,
                    0xf0.. => right.len() < 4,
                    _ => false,
                };
                for part in [starts.then_some(right), left.iter().all(inner).then_some(left)].into_iter().flatten() {
                    // In the order of numbers: the first stays.
                    crossing.entry(part).or_insert(product);
                }
            }
        }
        for (id, number) in self.ids.iter().zip(0..) {
            let text = texts.get(*id);
            if text.len() > 3 {
                continue;
            }
            let Some(character) = std::str::from_utf8(text).ok().and_then(|text| {
                let mut all = text.chars();
                all.next().filter(|_| all.next().is_none())
            }) else {
                continue;
            };
            let before = |part: &[u8]| crossing.get(part).is_some_and(|product| *product <= number);
            let split = (1..text.len()).any(|at| before(&text[..at]) || before(&text[at..]));
            if !split && (self.monotone || number < self.units) {
                chars[character as usize] = number;
            }
        }
        chars
    }

    /// Bytes of each token by id, 0 where it has no text of its own.
    pub fn widths(&self) -> &[u16] {
        &self.widths
    }

    /// Whether some byte has no token, and is left out of the ids.
    pub fn lacks_bytes(&self) -> bool {
        self.unit == Unit::Byte && self.bytes.contains(&NONE)
    }

    /// Whether a byte has a token of its own.
    pub fn has_byte(&self, byte: u8) -> bool {
        self.bytes[usize::from(byte)] != NONE
    }

    /// The bytes behind which some token holds a space: text may be cut before any other space that follows none.
    pub fn glue(&self) -> [bool; 256] {
        let mut glue = [false; 256];
        for text in self.texts() {
            for two in text.windows(2).filter(|two| two[0] != b' ' && two[1] == b' ') {
                glue[usize::from(two[0])] = true;
            }
        }
        glue
    }

    /// The texts of all tokens that merges can reach. Each alone becomes just that token.
    pub fn texts(&self) -> impl Iterator<Item = &[u8]> {
        self.ends.windows(2).map(|ends| &self.texts[ends[0] as usize..ends[1] as usize])
    }

    /// The ids of [`Bpe::texts`].
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Appends the ids of one piece. Bytes without a token are left out.
    pub fn encode(&self, piece: &[u8], memo: &mut Memo, ids: &mut Vec<u32>) {
        if !self.whole.is_empty()
            && let Some(id) = self.whole.get(piece)
        {
            ids.push(*id);
            return;
        }
        match self.unit {
            Unit::Byte if piece.iter().all(|byte| self.has_byte(*byte)) => self.search(piece, memo, ids),
            Unit::Byte => {
                let kept: Vec<u8> = piece.iter().copied().filter(|byte| self.has_byte(*byte)).collect();
                self.search(&kept, memo, ids);
            }
            Unit::Char => self.encode_chars(piece, memo, ids),
        }
    }

    /// Characters that the vocabulary lacks are bytes, and no merge crosses them.
    fn encode_chars(&self, piece: &[u8], memo: &mut Memo, ids: &mut Vec<u32>) {
        let (mut start, mut at) = (0, 0);
        while at < piece.len() {
            let length = match piece[at] {
                0..0x80 => 1,
                0x80..0xe0 => 2,
                0xe0..0xf0 => 3,
                _ => 4,
            };
            let stop = (at + length).min(piece.len());
            let known = if length == 1 {
                self.bytes[usize::from(piece[at])] != NONE
            } else {
                self.trie.get(&piece[at..stop]).is_some()
            };
            if !known {
                self.search(&piece[start..at], memo, ids);
                ids.extend(piece[at..stop].iter().map(|byte| self.fallback[usize::from(*byte)]));
                start = stop;
            }
            at = stop;
        }
        self.search(&piece[start..], memo, ids);
    }

    /// The symbols of a piece from which merging may start, and their number; none where they are too many for the room
    /// or some byte has no token.
    pub fn symbols(&self, piece: &[u8], room: &mut [u32]) -> Option<usize> {
        let (mut count, mut at) = (0, 0);
        while at < piece.len() {
            let (code, length) = match piece[at..] {
                [a @ 0..0x80, ..] => (u32::from(a), 1),
                [a @ 0xc0..0xe0, b @ 0x80..0xc0, ..] => (u32::from(a & 31) << 6 | u32::from(b & 63), 2),
                [a @ 0xe0..0xf0, b @ 0x80..0xc0, c @ 0x80..0xc0, ..] => {
                    (u32::from(a & 15) << 12 | u32::from(b & 63) << 6 | u32::from(c & 63), 3)
                }
                _ => (0xffff, 1),
            };
            let symbol = self.chars[code as usize];
            if symbol != NONE {
                *room.get_mut(count)? = symbol;
                count += 1;
            } else if self.unit == Unit::Char {
                return None;
            } else {
                for byte in &piece[at..at + length] {
                    let symbol = self.bytes[usize::from(*byte)];
                    *room.get_mut(count)? = symbol;
                    count += 1;
                    if symbol == NONE {
                        return None;
                    }
                }
            }
            at += length;
        }
        Some(count)
    }

    /// The id of a piece that the vocabulary holds and merges do not make ([`Model::ignore_merges`]).
    pub fn whole(&self, piece: &[u8]) -> Option<u32> {
        if self.whole.is_empty() { None } else { self.whole.get(piece).copied() }
    }

    /// Whether the ids of a piece are those of its parts ([`Bpe::borders`]).
    pub fn has_parts(&self) -> bool {
        self.whole.is_empty() && !self.lacks_bytes()
    }

    /// The pairs that merge.
    pub fn pairs(&self) -> &Pairs {
        &self.pairs
    }

    /// The search of the module's head: linear in the length.
    fn search(&self, piece: &[u8], memo: &mut Memo, ids: &mut Vec<u32>) {
        let Memo { answers, stack, dead, symbols, ranks } = memo;
        stack.clear();
        dead.clear();
        dead.resize(piece.len() / 64 + 1, 0);
        let mut at = 0;
        let mut next = self.trie.longest(piece);
        while next != NONE {
            let last = stack.last().copied();
            let mut token = next;
            next = loop {
                let end = at + self.lengths[token as usize] as usize;
                let alive = dead[end / 64] >> (end % 64) & 1 == 0;
                if alive && last.is_none_or(|last| self.is_valid(last, token, answers, symbols, ranks)) {
                    stack.push(token);
                    at = end;
                    break self.trie.longest(&piece[end..]);
                }
                token = self.shorter[token as usize];
                if token == NONE {
                    // Nothing fits here: this position is dead, and the token before it was too long.
                    dead[at / 64] |= 1 << (at % 64);
                    break match stack.pop() {
                        Some(last) => {
                            at -= self.lengths[last as usize] as usize;
                            last
                        }
                        None => NONE,
                    };
                }
            };
        }
        debug_assert_eq!(at, piece.len());
        ids.extend(stack.iter().map(|token| self.ids[*token as usize]));
    }

    /// Whether BPE turns the text of two tokens into just those two.
    #[inline(always)]
    fn is_valid(
        &self,
        left: u32,
        right: u32,
        answers: &mut [u64],
        symbols: &mut Vec<u32>,
        ranks: &mut Vec<u32>,
    ) -> bool {
        let key = pairs::key(left, right);
        let slot = &mut answers[(key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - MEMO_BITS)) as usize];
        if *slot >> 1 == key {
            return *slot & 1 == 1;
        }
        let valid = if self.monotone {
            self.walk(left, right, |left, right| self.pairs.get(left, right))
        } else {
            self.replay(left, right, symbols, ranks)
        };
        *slot = key << 1 | u64::from(valid);
        valid
    }

    /// Undoes the merges of two tokens, the latest first, and looks whether a pair across the border would have come
    /// before the one undone. Needs that parts have lower numbers than their product, so that numbers are times.
    fn walk(&self, mut left: u32, mut right: u32, product_of: impl Fn(u32, u32) -> u32) -> bool {
        // Products below it would have been made before what was undone last.
        let mut limit = NONE;
        loop {
            let product = product_of(left, right);
            if product != NONE && product < limit {
                return false;
            }
            if left > right {
                if left < self.units {
                    return true;
                }
                // Of equal ranks the one on the left comes first: inside `left`, before the border.
                limit = left;
                left = self.parts[left as usize].1;
            } else {
                if right < self.units {
                    return true;
                }
                // Here the border comes first.
                limit = right + 1;
                right = self.parts[right as usize].0;
            }
        }
    }

    /// The same by running BPE on the text of both.
    fn replay(&self, left: u32, right: u32, symbols: &mut Vec<u32>, products: &mut Vec<u32>) -> bool {
        symbols.clear();
        self.leaves(left, symbols);
        self.leaves(right, symbols);
        products.clear();
        products.extend(symbols.windows(2).map(|two| self.pairs.get(two[0], two[1])));
        while let Some((at, best)) = products.iter().copied().enumerate().min_by_key(|(_, product)| *product) {
            if best == NONE {
                break;
            }
            symbols[at] = best;
            symbols.remove(at + 1);
            products.remove(at);
            if at < products.len() {
                products[at] = self.pairs.get(best, symbols[at + 1]);
            }
            if at > 0 {
                products[at - 1] = self.pairs.get(symbols[at - 1], best);
            }
        }
        *symbols == [left, right]
    }

    fn leaves(&self, token: u32, symbols: &mut Vec<u32>) {
        if token < self.units {
            symbols.push(token);
            return;
        }
        let (left, right) = self.parts[token as usize];
        self.leaves(left, symbols);
        self.leaves(right, symbols);
    }
}

/// Merges as ids; `before` come before them.
fn merges_of(merges: &[(Cow<'_, str>, Cow<'_, str>)], before: usize, names: &Names<'_>) -> Result<Vec<Merge>, String> {
    /// Merges whose tokens are looked up together.
    const SOME: usize = 16;
    let mut all = Vec::with_capacity(merges.len());
    let mut joined = String::new();
    for (start, some) in (before..).step_by(SOME).zip(merges.chunks(SOME)) {
        joined.clear();
        let mut ends = [(0, 0); SOME];
        for (end, (left, right)) in ends.iter_mut().zip(some) {
            let from = joined.len();
            joined.push_str(left);
            joined.push_str(right);
            *end = (from, joined.len());
        }
        let found: [[Option<u32>; SOME]; 3] = [
            names.get_all(std::array::from_fn(|at| some.get(at).map_or("", |(left, _)| left.as_ref()))),
            names.get_all(std::array::from_fn(|at| some.get(at).map_or("", |(_, right)| right.as_ref()))),
            names.get_all(ends.map(|(from, to)| &joined[from..to])),
        ];
        for (at, rank) in (start..).take(some.len()).enumerate() {
            let [Some(left), Some(right), Some(product)] = found.map(|ids| ids[at]) else {
                return Err(format!("its merge {rank} has no token"));
            };
            all.push(Merge { left, right, product });
        }
    }
    Ok(all)
}

/// The trie of tokens by their inside numbers, and the longest shorter token that each starts with.
fn searched(ids: &[u32], texts: &Texts) -> (Trie, Vec<u32>) {
    let mut sorted: Vec<(&[u8], u32)> = ids.iter().zip(0..).map(|(id, number)| (texts.get(*id), number)).collect();
    sorted.sort_unstable();
    let mut shorter = vec![NONE; sorted.len()];
    let mut open: Vec<(&[u8], u32)> = Vec::new();
    for (text, number) in &sorted {
        while open.last().is_some_and(|(before, _)| !text.starts_with(before)) {
            open.pop();
        }
        shorter[*number as usize] = open.last().map_or(NONE, |(_, before)| *before);
        open.push((text, *number));
    }
    (Trie::new(&sorted), shorter)
}

/// A text as units; false where one has no token.
fn split_units(unit: Unit, text: &[u8], units: &FoldMap<&[u8], u32>, symbols: &mut Vec<u32>) -> bool {
    symbols.clear();
    let mut at = 0;
    while at < text.len() {
        let length = match (unit, text[at]) {
            (Unit::Byte, _) | (_, 0..0x80) => 1,
            (_, 0x80..0xe0) => 2,
            (_, 0xe0..0xf0) => 3,
            _ => 4,
        };
        let Some(id) = text.get(at..at + length).and_then(|part| units.get(part)) else { return false };
        symbols.push(*id);
        at += length;
    }
    true
}

/// Whether a text is one unit.
fn is_unit(unit: Unit, text: &[u8]) -> bool {
    match unit {
        Unit::Byte => text.len() == 1,
        Unit::Char => text.len() <= 4 && std::str::from_utf8(text).is_ok_and(|text| text.chars().count() == 1),
    }
}

/// The bytes that each id stands for, none where no text comes to the merges so.
fn texts_of(vocab: &[(Cow<'_, str>, u32)], top: usize, unit: Unit) -> Result<Texts, String> {
    let letters = letters();
    let mut texts = Texts { bytes: Vec::with_capacity(8 * vocab.len()), ranges: vec![(0, 0); top] };
    let mut taken = vec![false; top];
    for (token, id) in vocab {
        if std::mem::replace(&mut taken[*id as usize], true) {
            return Err("its vocabulary gives an id twice".to_string());
        }
        let start = texts.bytes.len();
        let whole = match unit {
            Unit::Byte => token.chars().all(|letter| {
                let byte = letters.get(letter as usize).copied().flatten();
                texts.bytes.extend(byte);
                byte.is_some()
            }),
            // A real space never comes to the merges: all are marks by then.
            Unit::Char if token.contains(' ') => false,
            Unit::Char => {
                texts.bytes.extend_from_slice(token.replace(SPACE_MARK, " ").as_bytes());
                true
            }
        };
        if !whole {
            texts.bytes.truncate(start);
        }
        let end = texts.bytes.len();
        if end - start > usize::from(u16::MAX) {
            return Err("its vocabulary has a token of more than 65535 bytes".to_string());
        }
        texts.ranges[*id as usize] = (start as u32, end as u32);
    }
    Ok(texts)
}

/// Runs BPE on units; gives the last pair and its rank where one symbol is left.
fn last_merge(
    pairs: &FoldMap<(u32, u32), (u32, u32)>,
    symbols: &mut Vec<u32>,
    ranks: &mut Vec<(u32, u32)>,
) -> Option<(u32, u32, u32)> {
    let pair = |left: u32, right: u32| pairs.get(&(left, right)).copied().unwrap_or((u32::MAX, 0));
    ranks.clear();
    ranks.extend(symbols.windows(2).map(|two| pair(two[0], two[1])));
    let mut last = None;
    while let Some((at, (rank, product))) = ranks.iter().copied().enumerate().min_by_key(|(_, (rank, _))| *rank) {
        if rank == u32::MAX {
            return None;
        }
        last = Some((symbols[at], symbols[at + 1], rank));
        symbols[at] = product;
        symbols.remove(at + 1);
        ranks.remove(at);
        if at < ranks.len() {
            ranks[at] = pair(symbols[at], symbols[at + 1]);
        }
        if at > 0 {
            ranks[at - 1] = pair(symbols[at - 1], symbols[at]);
        }
    }
    last
}
