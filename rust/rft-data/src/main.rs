//! `rft-data`: the same as `rft data`, as a program of its own.

use std::io::{self, Write};
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (mut out, mut err) = (io::BufWriter::new(io::stdout().lock()), io::stderr().lock());
    let code = rft_data::run("rft-data", &arguments, &mut out, &mut err, &|| Ok(()));
    match out.flush() {
        Ok(()) => ExitCode::from(code),
        // The reader of a pipe has seen enough: `rft-data ls | head`.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::from(1),
        Err(error) => {
            let _ = writeln!(err, "error  standard output: {error}");
            ExitCode::from(1)
        }
    }
}
