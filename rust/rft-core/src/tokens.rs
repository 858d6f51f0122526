//! Text and trained spans -> ids, a trained bit each, and weights.

use std::sync::Arc;

use crate::chat::{Filled, Masked, Method, Span};
use crate::error::Error;
use crate::row_error::{Reason, RowError};
use crate::said::{self, ByRole, Said};
use crate::spec::{ControlPolicy, EndOfTurn, Spec};
use crate::tokenizer::{Encoded, Scratch, Tokenizer, Unmarked};

/// A document, ready for the store.
#[derive(Clone, Debug, PartialEq)]
pub struct Tokens {
    /// Token ids.
    pub ids: Vec<u32>,
    /// A trained bit for each.
    pub trained: Vec<bool>,
    /// A loss factor for each, unless all are 1.
    pub weights: Option<Vec<f32>>,
    /// Tokens that lie across the border of a trained span.
    pub straddling: u64,
    /// Whether the row spelled a control token.
    pub spelled: bool,
    /// How the spans were found; none for raw text.
    pub method: Option<Method>,
    /// Messages to be trained on whose reasoning the template does not write.
    pub lost: u32,
    /// What is told of the row, in its first document.
    pub facts: Facts,
    /// Tokens that messages of each role say; none where it is no chat.
    pub by_role: Option<ByRole>,
}

/// What is counted of a document.
#[derive(Clone, Debug)]
pub struct Told {
    /// Number of tokens.
    pub tokens: u64,
    /// How many of them are trained on.
    pub trained: u64,
    /// As in [`Tokens`].
    pub straddling: u64,
    /// As in [`Tokens`].
    pub spelled: bool,
    /// As in [`Tokens`].
    pub method: Option<Method>,
    /// As in [`Tokens`].
    pub lost: u32,
    /// As in [`Tokens`].
    pub facts: Facts,
    /// As in [`Tokens`].
    pub by_role: Option<ByRole>,
}

impl Tokens {
    /// What is counted of it.
    pub fn told(&self) -> Told {
        Told {
            tokens: self.ids.len() as u64,
            trained: self.trained.iter().filter(|bit| **bit).count() as u64,
            straddling: self.straddling,
            spelled: self.spelled,
            method: self.method,
            lost: self.lost,
            facts: self.facts.clone(),
            by_role: self.by_role,
        }
    }
}

/// What is told of a row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Roles of its messages, a bit each, as in [`ROLES`](crate::example::ROLES).
    pub roles: u8,
    /// Fields of it that are not used.
    pub unused: Arc<[String]>,
    /// Whether it has tools that the template does not write.
    pub tools_ignored: bool,
    /// Whether no control token ends what is trained on: nothing in it teaches a model to stop.
    pub unended: bool,
}

type RowResult<T> = std::result::Result<T, RowError>;

/// A row with nothing to learn in it.
pub fn untrained(problem: &str) -> RowError {
    RowError::new(Reason::NoTrainedToken, "", problem)
}

fn tokenizer_error(error: Error) -> RowError {
    RowError::bad("", error.problem, "text that this tokenizer can write")
        .remedy("fix the row, set data.control_tokens = \"allow\", or skip bad rows with data.on_error = \"skip\"")
}

/// Raw text: begin of text where the tokenizer adds it, the prompt, the text, end of text. The prompt is not trained
/// on; both sides are tokenised for themselves, so that no token lies across the border.
pub fn of_raw(
    tokenizer: &Tokenizer,
    spec: &Spec,
    prompt: Option<&str>,
    text: &str,
    weight: f32,
    buffers: &mut Buffers,
) -> RowResult<Tokens> {
    if prompt.is_none() && text.trim().is_empty() {
        return Err(RowError::new(Reason::Empty, "text", "no text"));
    }
    if weight == 0.0 {
        return Err(untrained("its loss_weight is 0"));
    }
    let allow = spec.control_tokens == ControlPolicy::Allow;
    let scratch = buffers.scratch(tokenizer);
    let mut append = |text: &str, ids: &mut Vec<u32>| {
        if allow {
            tokenizer.encode_ids_into(text, scratch, ids)
        } else {
            tokenizer.encode_text_into(text, scratch, ids)
        }
        .map_err(tokenizer_error)
    };
    let (bos, eos) = (spec.tokenizer.bos_id.filter(|_| spec.tokenizer.add_bos), spec.tokenizer.eos_id);
    let mut ids: Vec<u32> = Vec::new();
    if let Some(prompt) = prompt {
        append(prompt, &mut ids)?;
    }
    let mut read = ids.len();
    append(text, &mut ids)?;
    // Where control tokens are allowed, the row may bring its own.
    if let Some(bos) = bos
        && ids.first() != Some(&bos)
    {
        ids.insert(0, bos);
        read += usize::from(prompt.is_some());
    }
    if ids.last() != Some(&eos) {
        ids.push(eos);
    }
    let mut trained: Vec<bool> = (0..ids.len()).map(|index| index >= read).collect();
    if prompt.is_some() && spec.end_of_turn == EndOfTurn::Mask {
        trained.pop();
        trained.push(false);
        if !trained.contains(&true) {
            return Err(untrained("its end token alone would be trained on"));
        }
    }
    let spelled = !allow && [prompt.unwrap_or_default(), text].iter().any(|text| tokenizer.control().is_spelled(text));
    let weights = (weight != 1.0).then(|| vec![weight; ids.len()]);
    let facts = Facts::default();
    Ok(Tokens { ids, trained, weights, straddling: 0, spelled, method: None, lost: 0, facts, by_role: None })
}

/// Raw texts, each tokenised for itself, control tokens recognised: the row writes them on purpose. Begin of text is put in
/// front where the tokenizer adds it, and nothing at the end.
pub fn of_segments(
    tokenizer: &Tokenizer,
    spec: &Spec,
    segments: &[(String, bool)],
    weight: f32,
    buffers: &mut Buffers,
) -> RowResult<Tokens> {
    let scratch = buffers.scratch(tokenizer);
    let (mut ids, mut trained) = (Vec::new(), Vec::new());
    for (text, label) in segments {
        tokenizer.encode_ids_into(text, scratch, &mut ids).map_err(tokenizer_error)?;
        trained.resize(ids.len(), *label);
    }
    if let Some(bos) = spec.tokenizer.bos_id.filter(|_| spec.tokenizer.add_bos)
        && ids.first() != Some(&bos)
    {
        ids.insert(0, bos);
        trained.insert(0, false);
    }
    of_ids(ids, trained, weight)
}

/// Tokens as a row states them.
pub fn of_ids(ids: Vec<u32>, trained: Vec<bool>, weight: f32) -> RowResult<Tokens> {
    if weight == 0.0 {
        return Err(untrained("its loss_weight is 0"));
    }
    if !trained.contains(&true) {
        return Err(untrained("no token of it is trained on"));
    }
    let weights = (weight != 1.0).then(|| vec![weight; ids.len()]);
    let (method, facts) = (Some(Method::Stated), Facts::default());
    Ok(Tokens { ids, trained, weights, straddling: 0, spelled: false, method, lost: 0, facts, by_role: None })
}

/// A rendered chat, exactly as the template wrote it. A token that overlaps a trained span is trained on. `said`: who says what
/// in its text.
pub fn of_chat(tokenizer: &Tokenizer, masked: &Masked, said: &[Said], buffers: &mut Buffers) -> RowResult<Tokens> {
    let clean = Unmarked::new(&masked.text);
    let encoded = tokenizer.encode_marked(&masked.text, &clean, buffers.scratch(tokenizer)).map_err(tokenizer_error)?;
    let spans: Vec<Span> = masked
        .spans
        .iter()
        .map(|span| Span { start: clean.position(span.start), end: clean.position(span.end), ..*span })
        .collect();
    let said: Vec<Said> = said
        .iter()
        .map(|part| Said { start: clean.position(part.start), end: clean.position(part.end), ..*part })
        .collect();
    let by_role = said::count(&said, encoded.offsets.len(), |index| encoded.offsets[index]);
    let mut tokens = mask(encoded.ids, encoded.offsets.into_iter(), &spans, masked.method, tokenizer);
    tokens.by_role = Some(by_role);
    tokens.lost = masked.lost;
    tokens.facts.tools_ignored = masked.tools_ignored;
    if tokens.trained.iter().any(|bit| *bit) { Ok(tokens) } else { Err(untrained("no token of it is trained on")) }
}

/// Buffers for tokens that one thread keeps from row to row.
#[derive(Default)]
pub struct Buffers {
    scratch: Option<Scratch>,
    ids: Vec<u32>,
    ends: Vec<u32>,
}

impl Buffers {
    /// What the tokenizer works with. Buffers belong to one tokenizer.
    fn scratch(&mut self, tokenizer: &Tokenizer) -> &mut Scratch {
        self.scratch.get_or_insert_with(|| tokenizer.scratch())
    }
}

/// A chat that was filled in: no mark is in it, and its control tokens are the template's. `said`: as in [`of_chat`].
pub fn of_filled(
    tokenizer: &Tokenizer,
    filled: &Filled,
    said: &[Said],
    method: Method,
    buffers: &mut Buffers,
) -> RowResult<Tokens> {
    let by_role;
    let mut tokens = if tokenizer.engine().fast {
        let Buffers { scratch, ids, ends } = buffers;
        ids.clear();
        ends.clear();
        let scratch = scratch.get_or_insert_with(|| tokenizer.scratch());
        tokenizer.encode_into(&filled.text, scratch, ids, ends).map_err(tokenizer_error)?;
        let start_of = |index: usize| index.checked_sub(1).map_or(0, |before| ends[before] as usize);
        by_role = said::count(said, ids.len(), |index| (start_of(index), ends[index] as usize));
        let starts = std::iter::once(0).chain(ends.iter().copied());
        let ranges = starts.zip(ends.iter()).map(|(start, end)| (start as usize, *end as usize));
        mask(ids.clone(), ranges, &filled.spans, method, tokenizer)
    } else {
        let Encoded { ids, offsets } = tokenizer.encode(&filled.text).map_err(tokenizer_error)?;
        by_role = said::count(said, ids.len(), |index| offsets[index]);
        mask(ids, offsets.into_iter(), &filled.spans, method, tokenizer)
    };
    tokens.by_role = Some(by_role);
    if tokens.trained.contains(&true) { Ok(tokens) } else { Err(untrained("no token of it is trained on")) }
}

/// `ranges`: the bytes of each token. A character that several tokens share may be cut between them or counted whole for
/// each: spans begin and end between characters.
fn mask(
    ids: Vec<u32>,
    ranges: impl Iterator<Item = (usize, usize)>,
    spans: &[Span],
    method: Method,
    tokenizer: &Tokenizer,
) -> Tokens {
    let mut trained = vec![false; ids.len()];
    let weighted = spans.iter().any(|span| span.weight != 1.0);
    let mut weights = weighted.then(|| vec![1.0; ids.len()]);
    let (mut straddling, mut next) = (0, 0);
    for (index, (start, end)) in ranges.enumerate() {
        // Token starts do not decrease, so spans that end before one are done with.
        while next < spans.len() && spans[next].end <= start {
            next += 1;
        }
        let Some(span) = spans.get(next) else { break };
        let overlaps = if start == end { span.start <= start } else { span.start < end };
        if !overlaps {
            continue;
        }
        trained[index] = true;
        if let Some(weights) = &mut weights {
            weights[index] = span.weight;
        }
        let inside = span.start <= start && end <= span.end;
        let goes_on = spans.get(next + 1).is_some_and(|after| after.start == span.end && end <= after.end);
        straddling += u64::from(!inside && !goes_on && !tokenizer.control().is_control(ids[index]));
    }
    // A line break may stand behind the token that ends a turn.
    let mut last = (0..ids.len()).rev().filter(|index| trained[*index]).take(2);
    let unended = !last.any(|index| tokenizer.control().is_control(ids[index]));
    let facts = Facts { unended, ..Facts::default() };
    Tokens { ids, trained, weights, straddling, spelled: false, method: Some(method), lost: 0, facts, by_role: None }
}
