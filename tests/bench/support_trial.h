// One problem on one server: planned, then executed and compared, or refused twice.
#pragma once

#include <string>

#include "client/cpp/client.h"
#include "tests/bench/support_problem.h"

namespace attnd::support {

struct Outcome {
  bool runs = false;  // Planned.
  bool agrees =
      false;  // It ran as planned and equals the reference loop, or was refused as planned.
  std::string backend;
  std::string engine;
  std::string reason;  // Refused: the sentence, which begins with the field.
  std::string fault;   // Where it does not agree: how.
};

// Plans the problem. What the plan accepts is executed: its results must be those of the reference
// loop, rows that no sequence has must be 0, the reply must name the planned engine, and a
// deterministic one must repeat its bytes. What it refuses must be refused with the same field.
Outcome Try(const Problem& problem, client::Client& client);

}  // namespace attnd::support
