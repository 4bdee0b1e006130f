// attnctl: the command line client.

#include <optional>

#include "client/cli/commands.h"
#include "client/cli/options.h"

int main(int argc, char** argv) {
  attnd::cli::Options options;
  if (const std::optional<int> exit_code = attnd::cli::ParseCommandLine(argc, argv, &options)) {
    return *exit_code;
  }
  return attnd::cli::Run(options);
}
