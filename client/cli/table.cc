#include "client/cli/table.h"

#include <algorithm>

namespace attnd::cli {

std::string RenderTable(const std::vector<Column>& columns,
                        const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  std::vector<std::string> titles;
  for (size_t c = 0; c < columns.size(); ++c) {
    titles.push_back(columns[c].title);
    widths.push_back(columns[c].title.size());
    for (const auto& row : rows) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string text;
  const auto add_line = [&](const std::vector<std::string>& cells) {
    std::string line;
    for (size_t c = 0; c < columns.size(); ++c) {
      const std::string fill(widths[c] - cells[c].size(), ' ');
      if (c > 0) line += "  ";
      line += columns[c].align == Align::kRight ? fill + cells[c] : cells[c] + fill;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  };
  add_line(titles);
  for (const auto& row : rows) add_line(row);
  return text;
}

}  // namespace attnd::cli
