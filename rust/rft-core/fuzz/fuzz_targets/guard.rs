//! libfuzzer-sys ends the process at every panic, but a panic inside a library that reads bytes from outside is caught by
//! rft and made an error of the file. So panics are only written down here, and one that nobody caught ends the process.

use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};
use std::sync::Mutex;

static LAST: Mutex<String> = Mutex::new(String::new());

pub fn listen() {
    set_hook(Box::new(|panic| {
        if let Ok(mut last) = LAST.lock() {
            *last = panic.to_string();
        }
    }));
}

pub fn hold(target: fn(&[u8]), data: &[u8]) {
    if catch_unwind(AssertUnwindSafe(|| target(data))).is_err() {
        eprintln!("{}", LAST.lock().map(|last| last.clone()).unwrap_or_default());
        std::process::abort();
    }
}
