# Finds the headers of CUTLASS (CuTe), which only the build needs. Sets XPRESS_CUTLASS_INCLUDE_DIR,
# empty where there are none: who cannot do without calls xpress_require_cutlass(what).
#
# The first of: XPRESS_CUTLASS_DIR (-D or environment; a checkout of CUTLASS, or its include folder)
# and then nothing else; the package nvidia-cutlass beside torch.

set(XPRESS_CUTLASS_MINIMUM 4.2)

if(NOT XPRESS_CUTLASS_DIR AND DEFINED ENV{XPRESS_CUTLASS_DIR})
  set(XPRESS_CUTLASS_DIR "$ENV{XPRESS_CUTLASS_DIR}")
endif()
if(XPRESS_CUTLASS_DIR)
  set(cutlass_candidates "${XPRESS_CUTLASS_DIR}/include" "${XPRESS_CUTLASS_DIR}")
else()
  get_filename_component(site_packages "${XPRESS_TORCH_DIR}" DIRECTORY)
  set(cutlass_candidates "${site_packages}/cutlass_library/source/include")
endif()

set(XPRESS_CUTLASS_INCLUDE_DIR "")
set(XPRESS_CUTLASS_VERSION "")
foreach(candidate IN LISTS cutlass_candidates)
  if(NOT XPRESS_CUTLASS_INCLUDE_DIR AND EXISTS "${candidate}/cute/tensor.hpp")
    set(XPRESS_CUTLASS_INCLUDE_DIR "${candidate}")
    file(READ "${candidate}/cutlass/version.h" cutlass_version_text)
    string(REGEX MATCH "CUTLASS_MAJOR ([0-9]+)" _ "${cutlass_version_text}")
    set(XPRESS_CUTLASS_VERSION "${CMAKE_MATCH_1}")
    string(REGEX MATCH "CUTLASS_MINOR ([0-9]+)" _ "${cutlass_version_text}")
    string(APPEND XPRESS_CUTLASS_VERSION ".${CMAKE_MATCH_1}")
  endif()
endforeach()

# Ends the configuration unless the headers are there; `what` needs them.
function(xpress_require_cutlass what)
  set(remedy "run `pip install --no-deps nvidia-cutlass==4.2.0.0`, or name a checkout of CUTLASS in XPRESS_CUTLASS_DIR")
  if(NOT XPRESS_CUTLASS_INCLUDE_DIR)
    if(XPRESS_CUTLASS_DIR)
      set(where "in XPRESS_CUTLASS_DIR=${XPRESS_CUTLASS_DIR}")
    else()
      set(where "beside torch")
    endif()
    message(FATAL_ERROR " XPRESS: error: ${what} needs the headers of CUTLASS, and there are none ${where}: ${remedy}.")
  endif()
  if(XPRESS_CUTLASS_VERSION VERSION_LESS XPRESS_CUTLASS_MINIMUM)
    message(FATAL_ERROR " XPRESS: error: CUTLASS ${XPRESS_CUTLASS_VERSION} at ${XPRESS_CUTLASS_INCLUDE_DIR} is too old: ${what} needs ${XPRESS_CUTLASS_MINIMUM} or newer: ${remedy}.")
  endif()
  message(STATUS "XPRESS: CUTLASS ${XPRESS_CUTLASS_VERSION} at ${XPRESS_CUTLASS_INCLUDE_DIR}")
endfunction()
