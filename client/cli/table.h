// Text in aligned columns.
#pragma once

#include <string>
#include <vector>

namespace attnd::cli {

enum class Align { kLeft, kRight };

struct Column {
  std::string title;
  Align align = Align::kLeft;
};

// One line for the titles and one for each row, two spaces between columns, no spaces at the ends
// of lines. Rows have as many cells as there are columns.
std::string RenderTable(const std::vector<Column>& columns,
                        const std::vector<std::vector<std::string>>& rows);

}  // namespace attnd::cli
