//! Which pieces of which documents make which pack: a function of the set, the options, seed and epoch, never of the
//! number of ranks. The position in the data is {plan hash, epoch, step}.

use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use crate::error::{Error, Kind, Result};
use crate::order::Random;
pub use crate::pack::Packing;
use crate::pack::{self, MAX_CAPACITY, Packed};
use crate::store::{Shard, Store};

/// Version of the packing: raised when the same arguments give other packs.
const PLAN_VERSION: u32 = 2;
/// What a token costs beside attention, in squared lengths.
const LINEAR_COST: u64 = 16_384;
/// Use of the random numbers that give each window a seed.
const WINDOW_SEED: u64 = 2;
/// Rows of `packing = "none"` are filled up to a multiple of this.
pub const ROW_MULTIPLE: usize = 64;

/// What happens to documents longer than a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overlong {
    /// They become several pieces.
    Split,
    /// Their end is cut off.
    Truncate,
    /// They are left out.
    Drop,
    /// They stop the run.
    Error,
}

impl FromStr for Overlong {
    type Err = Error;

    fn from_str(name: &str) -> Result<Overlong> {
        match name {
            "split" => Ok(Overlong::Split),
            "truncate" => Ok(Overlong::Truncate),
            "drop" => Ok(Overlong::Drop),
            "error" => Ok(Overlong::Error),
            _ => Err(Error::new(Kind::Argument, "overlong", format!("{name:?} is unknown"))
                .wanted("split, truncate, drop or error")),
        }
    }
}

/// What a plan depends on beside the set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanOptions {
    /// Tokens of a pack.
    pub seq_len: u32,
    /// How documents share packs.
    pub packing: Packing,
    /// What happens to longer documents.
    pub overlong: Overlong,
    /// Seed of the order.
    pub seed: u64,
    /// Epoch, from 0.
    pub epoch: u64,
    /// Whether the order is shuffled; else it is that of the set.
    pub shuffle: bool,
}

/// Part of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Index in the set.
    pub document: u32,
    /// First token, within the document.
    pub start: u32,
    /// Number of tokens.
    pub length: u32,
}

/// What became of the documents. Tokens of the set = tokens of the plan + truncated + dropped + unlabelled ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlanCounts {
    /// Documents of the set.
    pub documents: u64,
    /// Documents cut into several pieces.
    pub split_documents: u64,
    /// Pieces and whole documents in packs.
    pub pieces: u64,
    /// Documents whose end was cut off.
    pub truncated_documents: u64,
    /// Tokens cut off.
    pub truncated_tokens: u64,
    /// Documents left out because they are too long.
    pub dropped_documents: u64,
    /// Their tokens.
    pub dropped_tokens: u64,
    /// Documents of which no part with a trained token is left.
    pub unlabelled_documents: u64,
    /// Tokens of pieces left out because nothing in them is trained on.
    pub unlabelled_tokens: u64,
}

impl PlanCounts {
    /// Name and number of each.
    pub fn entries(&self) -> [(&'static str, u64); 9] {
        [
            ("documents", self.documents),
            ("split_documents", self.split_documents),
            ("pieces", self.pieces),
            ("truncated_documents", self.truncated_documents),
            ("truncated_tokens", self.truncated_tokens),
            ("dropped_documents", self.dropped_documents),
            ("dropped_tokens", self.dropped_tokens),
            ("unlabelled_documents", self.unlabelled_documents),
            ("unlabelled_tokens", self.unlabelled_tokens),
        ]
    }
}

/// The packs of an epoch.
pub struct Plan {
    store: Arc<Store>,
    options: PlanOptions,
    hash: String,
    /// Parts of documents longer than a pack.
    pieces: Vec<Piece>,
    /// A document, or from the number of documents on a piece; pack after pack.
    order: Packed,
    pack_tokens: Vec<u32>,
    pack_labels: Vec<u32>,
    counts: PlanCounts,
    /// First pack of each window; none where the order is over the whole set.
    windows: Vec<usize>,
}

impl Plan {
    /// Makes the plan. O(documents), plus the shuffle.
    ///
    /// # Errors
    /// A document longer than a pack under `overlong = error`; no label in any pack.
    pub fn new(store: Arc<Store>, options: PlanOptions) -> Result<Plan> {
        Plan::build(store, options, None).and_then(Plan::checked)
    }

    /// Packs of one shard (a window) behind those of the other, each shuffled and packed for itself, so that the packs of a
    /// window need nothing but its shard and its number.
    ///
    /// # Errors
    /// As of [`Plan::new`].
    pub fn windowed(store: Arc<Store>, options: PlanOptions) -> Result<Plan> {
        Plan::build(store, options, Some(0)).and_then(Plan::checked)
    }

    /// The part of such a plan that is window number `window`; `store` holds that one alone. It may hold no pack.
    ///
    /// # Errors
    /// A document longer than a pack under `overlong = error`.
    pub fn of_window(store: Arc<Store>, options: PlanOptions, window: u64) -> Result<Plan> {
        Plan::build(store, options, Some(window))
    }

    fn checked(self) -> Result<Plan> {
        if self.num_label_tokens() == 0 { Err(self.no_labels()) } else { Ok(self) }
    }

    /// `first_window`: number of the first shard as a window; none for a plan over the whole set at once.
    fn build(store: Arc<Store>, options: PlanOptions, first_window: Option<u64>) -> Result<Plan> {
        if options.seq_len == 0 || options.seq_len > MAX_CAPACITY {
            return Err(
                Error::new(Kind::Argument, "seq_len", format!("{} tokens", options.seq_len)).wanted("1 to 2^24")
            );
        }
        let mut items = Items::collect(&store, options)?;
        let pieces = std::mem::take(&mut items.pieces);
        let length = |code: &u32| piece_of(&store, &pieces, *code).length;
        let lengths: Vec<u32> = items.codes.iter().map(length).collect();
        let misfit = |misfit: pack::Misfit| {
            let problem = format!("piece {} has {} tokens, more than a pack", misfit.index, misfit.length);
            Error::new(Kind::Argument, "plan", problem)
        };
        let arrange = |lengths: &[u32], seed: u64| {
            let shuffle = options.shuffle.then_some((seed, options.epoch));
            pack::arrange(lengths, options.seq_len, options.packing, shuffle).map_err(misfit)
        };
        let (mut order, mut windows) = match first_window {
            None => (arrange(&lengths, options.seed)?, Vec::new()),
            Some(_) => (Packed::default(), Vec::new()),
        };
        if let Some(first) = first_window {
            let mut start = 0;
            for (window, end) in (first..).zip(items.ends_of_shards(&store, &pieces)) {
                windows.push(order.len());
                let seed = Random::new(options.seed, window, WINDOW_SEED).next();
                order.append(start as u32, &arrange(&lengths[start..end], seed)?);
                start = end;
            }
        }
        for item in &mut order.items {
            *item = items.codes[*item as usize];
        }
        let mut plan = Plan {
            hash: String::new(),
            store,
            options,
            pieces,
            order,
            pack_tokens: Vec::new(),
            pack_labels: Vec::new(),
            counts: items.counts,
            windows,
        };
        plan.count_packs();
        plan.hash = plan.hash_of(first_window);
        Ok(plan)
    }

    fn count_packs(&mut self) {
        let packs = 0..self.num_packs();
        self.pack_tokens = packs.clone().map(|pack| self.pack(pack).map(|piece| piece.length).sum()).collect();
        self.pack_labels = packs.map(|pack| self.pack(pack).map(|piece| self.labels(piece)).sum()).collect();
    }

    /// Labels of a piece after the shift: its first token is nobody's target.
    fn labels(&self, piece: Piece) -> u32 {
        let range = self.tokens_of(piece);
        self.store.count_trained(range.start + 1..range.end)
    }

    fn hash_of(&self, first_window: Option<u64>) -> String {
        let mut hash = Xxh3::new();
        let PlanOptions { seq_len, packing, overlong, seed, epoch, shuffle } = self.options;
        let head = format!(
            "{PLAN_VERSION}|{}|{seq_len}|{packing:?}|{overlong:?}|{seed}|{epoch}|{shuffle}",
            self.store.manifest().key
        );
        hash.update(head.as_bytes());
        if let Some(window) = first_window {
            hash.update(format!("|windows from {window}").as_bytes());
        }
        for piece in &self.pieces {
            for part in [piece.document, piece.start, piece.length] {
                hash.update(&part.to_le_bytes());
            }
        }
        let mut buffer = Vec::with_capacity(1 << 16);
        for list in [&self.order.items, &self.order.offsets] {
            for chunk in list.chunks(1 << 14) {
                buffer.clear();
                buffer.extend(chunk.iter().flat_map(|number| number.to_le_bytes()));
                hash.update(&buffer);
            }
        }
        format!("{:032x}", hash.digest128())
    }

    fn no_labels(&self) -> Error {
        let PlanCounts { documents, unlabelled_documents, dropped_documents, .. } = self.counts;
        let problem = format!(
            "no token to train on is left at seq_len {}: of {documents} documents {unlabelled_documents} have none within it and {dropped_documents} are too long",
            self.options.seq_len
        );
        Error::new(Kind::Data, self.store.path().display().to_string(), problem)
            .wanted("at least one label in the set")
            .remedy("raise data.seq_len, or set data.overlong = \"split\"")
    }

    /// The set.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// What the plan was made with.
    pub fn options(&self) -> &PlanOptions {
        &self.options
    }

    /// 32 hex digits.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Number of packs.
    pub fn num_packs(&self) -> usize {
        self.order.len()
    }

    /// First pack of each window; empty where the order is over the whole set.
    pub fn windows(&self) -> &[usize] {
        &self.windows
    }

    /// Tokens in packs, without fill-up.
    pub fn num_tokens(&self) -> u64 {
        self.pack_tokens.iter().map(|tokens| u64::from(*tokens)).sum()
    }

    /// Labels after the shift.
    pub fn num_label_tokens(&self) -> u64 {
        self.pack_labels.iter().map(|labels| u64::from(*labels)).sum()
    }

    /// Tokens over the tokens of the rows that hold them.
    pub fn fill(&self) -> f64 {
        let room: u64 = self.pack_tokens.iter().map(|tokens| self.row(*tokens)).sum();
        if room == 0 { 0.0 } else { self.num_tokens() as f64 / room as f64 }
    }

    /// What became of the documents.
    pub fn counts(&self) -> &PlanCounts {
        &self.counts
    }

    /// Pieces of a pack, in the order in which they lie in it.
    pub fn pack(&self, index: usize) -> impl Iterator<Item = Piece> + '_ {
        self.order.bin(index).iter().map(|code| piece_of(&self.store, &self.pieces, *code))
    }

    /// What a pack costs against others of the plan: its attention, the sum of squared lengths. The rest costs the same for
    /// rows of one length; rows of their own length (`none`) add it, at the length where both are equal in a model of 1B.
    pub fn cost(&self, index: usize) -> u64 {
        let attention = self.pack(index).map(|piece| u64::from(piece.length).pow(2)).sum::<u64>();
        match self.options.packing {
            Packing::None => attention + LINEAR_COST * self.row(self.pack_tokens[index]),
            _ => attention,
        }
    }

    /// Length of the row that holds so many tokens.
    fn row(&self, tokens: u32) -> u64 {
        match self.options.packing {
            Packing::None => padded(tokens as usize, self.options.seq_len as usize) as u64,
            _ => u64::from(self.options.seq_len),
        }
    }

    /// Real tokens of each pack.
    pub fn pack_tokens(&self) -> &[u32] {
        &self.pack_tokens
    }

    /// Labels of each pack.
    pub fn pack_labels(&self) -> &[u32] {
        &self.pack_labels
    }

    /// Where a piece lies among the set's tokens.
    pub fn tokens_of(&self, piece: Piece) -> std::ops::Range<usize> {
        let start = self.store.range(piece.document as usize).start + piece.start as usize;
        start..start + piece.length as usize
    }
}

/// Length of a row of `packing = "none"` that holds `tokens`: a multiple of 64, but never more than a pack.
pub fn padded(tokens: usize, seq_len: usize) -> usize {
    tokens.max(1).next_multiple_of(ROW_MULTIPLE).min(seq_len)
}

fn piece_of(store: &Store, pieces: &[Piece], code: u32) -> Piece {
    match (code as usize).checked_sub(store.num_documents()) {
        Some(piece) => pieces[piece],
        None => Piece { document: code, start: 0, length: store.length(code as usize) },
    }
}

/// What goes into packs, in the order of the set.
struct Items {
    codes: Vec<u32>,
    pieces: Vec<Piece>,
    counts: PlanCounts,
}

impl Items {
    /// For each shard the number of items in it and those before.
    fn ends_of_shards(&self, store: &Store, pieces: &[Piece]) -> Vec<usize> {
        let mut documents = 0;
        let end_of = |shard: &Shard| {
            documents += shard.num_documents();
            self.codes.partition_point(|code| (piece_of(store, pieces, *code).document as usize) < documents)
        };
        store.shards().iter().map(end_of).collect()
    }

    fn collect(store: &Store, options: PlanOptions) -> Result<Items> {
        let documents = store.num_documents();
        let counts = PlanCounts { documents: documents as u64, ..PlanCounts::default() };
        let mut items = Items { codes: Vec::with_capacity(documents), pieces: Vec::new(), counts };
        for document in 0..documents {
            let length = store.length(document);
            if length > options.seq_len {
                items.overlong(store, document, length, options)?;
            } else if store.count_trained(store.range(document)) == 0 {
                items.counts.unlabelled_documents += 1;
                items.counts.unlabelled_tokens += u64::from(length);
            } else {
                items.codes.push(document as u32);
            }
        }
        if documents + items.pieces.len() > u32::MAX as usize {
            return Err(Error::new(Kind::Argument, "plan", "more pieces than can be numbered"));
        }
        items.counts.pieces = items.codes.len() as u64;
        Ok(items)
    }

    fn overlong(&mut self, store: &Store, document: usize, length: u32, options: PlanOptions) -> Result<()> {
        let seq_len = options.seq_len;
        let starts: Vec<u32> = match options.overlong {
            Overlong::Error => {
                let (path, line) = store.origin(document);
                let place = if path.is_empty() {
                    format!("document {document}")
                } else {
                    format!("{}:{line}", Path::new(path).display())
                };
                let problem = format!("the row has {length} tokens, data.seq_len is {seq_len}");
                return Err(Error::new(Kind::Data, place, problem)
                    .remedy("raise data.seq_len, or set data.overlong to split, truncate or drop"));
            }
            Overlong::Drop => {
                self.counts.dropped_documents += 1;
                self.counts.dropped_tokens += u64::from(length);
                return Ok(());
            }
            Overlong::Truncate => {
                self.counts.truncated_documents += 1;
                self.counts.truncated_tokens += u64::from(length - seq_len);
                vec![0]
            }
            Overlong::Split => {
                self.counts.split_documents += 1;
                (0..length).step_by(seq_len as usize).collect()
            }
        };
        let base = store.range(document).start;
        let mut kept = false;
        for start in starts {
            let length = seq_len.min(length - start);
            let first = base + start as usize;
            if store.count_trained(first..first + length as usize) == 0 {
                self.counts.unlabelled_tokens += u64::from(length);
                continue;
            }
            kept = true;
            self.codes.push((store.num_documents() + self.pieces.len()) as u32);
            self.pieces.push(Piece { document: document as u32, start, length });
        }
        self.counts.unlabelled_documents += u64::from(!kept);
        Ok(())
    }
}
