// The subcommands: call the server, print, and say how the program ends.
#pragma once

#include "client/cli/options.h"

namespace attnd::cli {

// Runs options.command. Results go to standard output; an error is one line on standard error (with
// --json, an error of the server also a document on standard output). Returns the exit code.
int Run(const Options& options);

}  // namespace attnd::cli
