//! Why a row is left out, and what it is counted as.

/// Why a row is left out. `Bad` ones stop the run unless bad rows are skipped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowError {
    /// What it is counted as.
    pub reason: Reason,
    /// Field of the row, as in `messages[1].role`; may be empty.
    pub field: String,
    /// What is there.
    pub problem: String,
    /// What is accepted.
    pub wanted: String,
    /// What to do.
    pub remedy: String,
}

/// What a dropped row is counted as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// It cannot be read.
    BadRow,
    /// The template does not take it.
    TemplateError,
    /// There is nothing in it.
    Empty,
    /// Nothing in it is trained on.
    NoTrainedToken,
    /// It belongs to the held-out part.
    HeldOut,
    /// It belongs to the training part.
    NotHeldOut,
    /// The weight of its data set leaves it out.
    NotSampled,
    /// Its data set has had as many rows as it may.
    OverMaxRows,
    /// The same document was kept before.
    Duplicate,
}

impl Reason {
    /// The words in counts.
    pub fn name(self) -> &'static str {
        match self {
            Reason::BadRow => "bad row",
            Reason::TemplateError => "template error",
            Reason::Empty => "empty",
            Reason::NoTrainedToken => "no trained token",
            Reason::HeldOut => "held out",
            Reason::NotHeldOut => "not held out",
            Reason::NotSampled => "not sampled",
            Reason::OverMaxRows => "over max_rows",
            Reason::Duplicate => "duplicate",
        }
    }

    /// Whether it is a fault of the row, as opposed to a choice.
    pub fn is_error(self) -> bool {
        matches!(self, Reason::BadRow | Reason::TemplateError)
    }
}

impl RowError {
    /// A row dropped for a reason, with what is there.
    pub fn new(reason: Reason, field: impl Into<String>, problem: impl Into<String>) -> Self {
        RowError { reason, field: field.into(), problem: problem.into(), wanted: String::new(), remedy: String::new() }
    }

    /// A row that cannot be read.
    pub fn bad(field: impl Into<String>, problem: impl Into<String>, wanted: impl Into<String>) -> Self {
        RowError { wanted: wanted.into(), ..RowError::new(Reason::BadRow, field, problem) }
    }

    /// Says what to do.
    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = remedy.into();
        self
    }
}
