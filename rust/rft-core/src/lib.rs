//! The data path of rft: rows in, packed batches out. No Python and no torch in it.
//!
//! [`prepare::prepare`] turns files into a [`store::Store`] of whole documents with a trained bit for each token;
//! a [`plan::Plan`] says which pieces of which documents make which pack of an epoch; a [`stream::Stream`] writes one
//! rank's packs into buffers of the caller.

#![warn(missing_docs)]

pub mod balance;
pub mod batch;
pub mod chat;
pub mod counts;
pub mod detect;
pub mod error;
pub mod example;
pub mod feed;
pub mod format;
pub mod jsonl;
pub mod key;
pub mod lean;
pub mod order;
pub mod pack;
pub mod pipeline;
pub mod plan;
pub mod prepare;
pub mod pytext;
pub mod readers;
pub mod row_error;
pub mod rows;
pub mod said;
mod seen;
pub mod spec;
pub mod store;
pub mod stream;
pub mod template;
pub mod tokenizer;
pub mod tokens;

pub use error::{Error, Kind, Result, visible};
