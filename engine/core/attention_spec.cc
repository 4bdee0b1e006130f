#include "engine/core/attention_spec.h"

#include "engine/core/layout_table.h"

namespace attnd {

std::string_view Name(Layout layout) {
  if (layout == Layout::kStrided) return "STRIDED";
  const LayoutEntry* entry = FindLayout(layout);
  return entry == nullptr ? "UNSPECIFIED" : entry->name;
}

}  // namespace attnd
