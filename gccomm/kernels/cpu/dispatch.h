// Which instruction-set level runs.
#pragma once
#include <string>
#include <vector>

#include "table.h"

namespace gccomm {

std::vector<std::string> usable_levels();  // best last
const std::string& current_level();
void choose_level(const std::string& name);  // std::invalid_argument if unknown or not usable here
const Kernels& kernels();

}  // namespace gccomm
