# Finds nvcc and reads the list of architectures. Sets
#   XPRESS_NVCC                      the compiler, or empty: then the library has no CUDA half
#   XPRESS_NO_CUDA_REASON            why it has none
#   XPRESS_NVCC_VERSION, XPRESS_CUDA_ARCH_NAMES, XPRESS_CMAKE_CUDA_ARCHITECTURES,
#   XPRESS_CUDA_LIBRARY_DIRS
# torch's own search is of no use here: under a CPU build of torch it finds no toolkit.

if(NOT DEFINED XPRESS_CUDA)
  set(XPRESS_CUDA auto)
  if(DEFINED ENV{XPRESS_CUDA} AND NOT "$ENV{XPRESS_CUDA}" STREQUAL "")
    set(XPRESS_CUDA "$ENV{XPRESS_CUDA}")
  endif()
endif()
if(NOT XPRESS_CUDA MATCHES "^(auto|0|1)$")
  message(FATAL_ERROR " XPRESS: error: XPRESS_CUDA='${XPRESS_CUDA}' is not understood: give auto (CUDA where nvcc is found), 1 (required) or 0 (without).")
endif()

# The first nvcc of: $CUDACXX (and then nothing else), PATH, $CUDA_HOME and $CUDA_PATH,
# /usr/local/cuda, and the nvidia-cuda-nvcc package beside torch.
function(xpress_find_nvcc result)
  if(DEFINED ENV{CUDACXX} AND NOT "$ENV{CUDACXX}" STREQUAL "")
    find_program(named_nvcc "$ENV{CUDACXX}" NO_CACHE)
    set(${result} "${named_nvcc}" PARENT_SCOPE)
    return()
  endif()
  get_filename_component(site_packages "${XPRESS_TORCH_DIR}" DIRECTORY)
  file(GLOB pypi_toolkits "${site_packages}/nvidia/cu[0-9]*/bin")
  find_program(
    found_nvcc nvcc NO_CACHE
    PATHS ENV PATH
    NO_DEFAULT_PATH)
  if(NOT found_nvcc)
    find_program(
      found_nvcc nvcc NO_CACHE
      PATHS "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin" /usr/local/cuda/bin ${pypi_toolkits}
      NO_DEFAULT_PATH)
  endif()
  set(${result} "${found_nvcc}" PARENT_SCOPE)
endfunction()

# "8.0;9.0a;12.0+PTX" (or with spaces or commas) -> CMake's "80-real;90a-real;120".
function(xpress_read_architectures text result)
  string(REGEX REPLACE "[ ,;]+" ";" names "${text}")
  set(architectures "")
  foreach(name IN LISTS names)
    if(NOT name MATCHES "^([0-9]+)\\.([0-9])([af]?)(\\+PTX)?$")
      message(FATAL_ERROR " XPRESS: error: TORCH_CUDA_ARCH_LIST has '${name}', which is not understood: give architectures like 8.0;9.0a;12.0+PTX.")
    endif()
    set(architecture "${CMAKE_MATCH_1}${CMAKE_MATCH_2}${CMAKE_MATCH_3}")
    if(NOT CMAKE_MATCH_4)
      string(APPEND architecture "-real")
    endif()
    list(APPEND architectures "${architecture}")
  endforeach()
  set(${result} "${architectures}" PARENT_SCOPE)
endfunction()

set(XPRESS_NVCC "")
set(XPRESS_NVCC_VERSION "")
set(XPRESS_CUDA_ARCH_NAMES "")
set(XPRESS_NO_CUDA_REASON "")
if(XPRESS_CUDA STREQUAL "0")
  set(XPRESS_NO_CUDA_REASON "built with XPRESS_CUDA=0")
else()
  xpress_find_nvcc(XPRESS_NVCC)
  if(NOT XPRESS_NVCC)
    set(XPRESS_NVCC "")
    if(NOT "$ENV{CUDACXX}" STREQUAL "")
      set(XPRESS_NO_CUDA_REASON "CUDACXX=$ENV{CUDACXX} is no program")
    else()
      set(XPRESS_NO_CUDA_REASON "no nvcc was found when it was built")
    endif()
    if(XPRESS_CUDA STREQUAL "1")
      message(FATAL_ERROR " XPRESS: error: XPRESS_CUDA=1 but ${XPRESS_NO_CUDA_REASON}: put a CUDA 12.8+ toolkit's nvcc on PATH or name it in CUDACXX, take the pinned one with `XPRESS_CUDA=1 make build`, or set XPRESS_CUDA=0.")
    endif()
  endif()
endif()

if(XPRESS_NVCC)
  if("$ENV{TORCH_CUDA_ARCH_LIST}" STREQUAL "" AND "${TORCH_CUDA_ARCH_LIST}" STREQUAL "")
    # There may be no GPU to ask on the machine that builds.
    set(XPRESS_CUDA_ARCH_NAMES "9.0a")
  elseif(NOT "${TORCH_CUDA_ARCH_LIST}" STREQUAL "")
    set(XPRESS_CUDA_ARCH_NAMES "${TORCH_CUDA_ARCH_LIST}")
  else()
    set(XPRESS_CUDA_ARCH_NAMES "$ENV{TORCH_CUDA_ARCH_LIST}")
  endif()
  xpress_read_architectures("${XPRESS_CUDA_ARCH_NAMES}" XPRESS_CMAKE_CUDA_ARCHITECTURES)
  string(REGEX REPLACE "[ ,;]+" "," XPRESS_CUDA_ARCH_NAMES "${XPRESS_CUDA_ARCH_NAMES}")

  # The PyPI toolkit keeps its libraries in lib, where nvcc's own search (lib64) misses them.
  get_filename_component(nvcc_bin "${XPRESS_NVCC}" DIRECTORY)
  get_filename_component(toolkit "${nvcc_bin}" DIRECTORY)
  set(XPRESS_CUDA_LIBRARY_DIRS "")
  if(EXISTS "${toolkit}/lib/libcudart_static.a")
    set(XPRESS_CUDA_LIBRARY_DIRS "${toolkit}/lib")
    set(ENV{LIBRARY_PATH} "${toolkit}/lib:$ENV{LIBRARY_PATH}")
  endif()

  set(CMAKE_CUDA_COMPILER "${XPRESS_NVCC}")
  set(CMAKE_CUDA_ARCHITECTURES "${XPRESS_CMAKE_CUDA_ARCHITECTURES}")
  enable_language(CUDA)
  set(XPRESS_NVCC_VERSION "${CMAKE_CUDA_COMPILER_VERSION}")
  message(STATUS "XPRESS: CUDA ${XPRESS_NVCC_VERSION} (${XPRESS_NVCC}) for ${XPRESS_CUDA_ARCH_NAMES}")
else()
  message(STATUS "XPRESS: without CUDA: ${XPRESS_NO_CUDA_REASON}")
endif()
