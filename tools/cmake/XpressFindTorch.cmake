# Finds the torch package without importing it. Sets XPRESS_TORCH_DIR and XPRESS_TORCH_VERSION.

if(NOT XPRESS_TORCH_DIR AND DEFINED ENV{XPRESS_TORCH_DIR})
  set(XPRESS_TORCH_DIR "$ENV{XPRESS_TORCH_DIR}")
endif()

if(NOT XPRESS_TORCH_DIR)
  # .venv is where `make` puts the pinned torch; elsewhere the active interpreter is asked.
  if(NOT Python3_EXECUTABLE AND NOT DEFINED ENV{VIRTUAL_ENV}
     AND EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/.venv/bin/python")
    set(Python3_EXECUTABLE "${CMAKE_CURRENT_SOURCE_DIR}/.venv/bin/python")
  endif()
  find_package(Python3 COMPONENTS Interpreter)
  if(Python3_EXECUTABLE)
    execute_process(
      COMMAND "${Python3_EXECUTABLE}" -c
              "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
      OUTPUT_VARIABLE found_torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    set(XPRESS_TORCH_DIR "${found_torch_dir}" CACHE PATH "folder of the torch package")
  endif()
endif()

if(NOT EXISTS "${XPRESS_TORCH_DIR}/version.py")
  message(FATAL_ERROR " XPRESS: error: no torch package found (looked at '${XPRESS_TORCH_DIR}'): install torch>=2.10, or set XPRESS_TORCH_DIR to the folder of an installed one.")
endif()
file(READ "${XPRESS_TORCH_DIR}/version.py" torch_version_text)
string(REGEX MATCH "__version__ = '([0-9]+\\.[0-9]+[^']*)'" _ "${torch_version_text}")
set(XPRESS_TORCH_VERSION "${CMAKE_MATCH_1}")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" torch_short_version "${XPRESS_TORCH_VERSION}")
if(torch_short_version VERSION_LESS 2.10)
  message(FATAL_ERROR " XPRESS: error: torch ${XPRESS_TORCH_VERSION} at ${XPRESS_TORCH_DIR} is too old: install torch>=2.10 (its stable ABI is what the operators are built on).")
endif()
message(STATUS "XPRESS: torch ${XPRESS_TORCH_VERSION} at ${XPRESS_TORCH_DIR}")
