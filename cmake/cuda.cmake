# Decides whether the CUDA kernels are built (KVOPS_WITH_CUDA) and for which GPUs. Where they are not, KVOPS_REASON says why:
# it is shown by the build and by kvops.cuda_available().reason.
include(CheckLanguage)

set(KVOPS_CUDA AUTO CACHE STRING "CUDA kernels: AUTO (where nvcc is found), ON (fail where it is not) or OFF")
if(NOT KVOPS_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "KVOPS_CUDA is '${KVOPS_CUDA}', expected AUTO, ON or OFF")
endif()

set(KVOPS_WITH_CUDA OFF)
if(KVOPS_CUDA STREQUAL "OFF")
  set(KVOPS_REASON "KVOPS_CUDA was OFF")
else()
  set(KVOPS_REASON "nvcc was not found on PATH, in CUDA_HOME or in /usr/local/cuda")
  if(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)  # what an earlier build in this folder did not find may be there now
    if(NOT DEFINED ENV{CUDACXX})
      find_program(nvcc nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin NO_CACHE)
      if(nvcc)
        set(ENV{CUDACXX} "${nvcc}")
      endif()
    endif()
    if(DEFINED ENV{CUDACXX})
      check_language(CUDA)
      set(KVOPS_REASON "$ENV{CUDACXX} does not compile a test program together with ${CMAKE_CXX_COMPILER}")
    endif()
  endif()
  if(CMAKE_CUDA_COMPILER)
    set(KVOPS_WITH_CUDA ON)
    set(KVOPS_REASON "")
  elseif(KVOPS_CUDA STREQUAL "ON")
    message(FATAL_ERROR "KVOPS_CUDA=ON, but ${KVOPS_REASON}")
  endif()
endif()

if(NOT KVOPS_WITH_CUDA)
  message(WARNING
    "\n"
    "  kvops is being built WITHOUT its CUDA kernels: ${KVOPS_REASON}.\n"
    "  It will move caches in host memory only, and refuse every CUDA tensor.\n"
    "  To have the kernels, install the CUDA toolkit or name its folder in CUDA_HOME, and build again.\n")
  set(KVOPS_CUDA_VERSION 0)
  return()
endif()

# CMAKE_CUDA_ARCHITECTURES and CUDAARCHS have their usual meaning. The default: every architecture from sm_80 to sm_120 that
# this nvcc knows, and PTX of the newest for the GPUs to come.
if(NOT DEFINED CACHE{CMAKE_CUDA_ARCHITECTURES})
  if(DEFINED ENV{CUDAARCHS})
    set(CMAKE_CUDA_ARCHITECTURES "$ENV{CUDAARCHS}")
  else()
    execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-code OUTPUT_VARIABLE known COMMAND_ERROR_IS_FATAL ANY)
    set(CMAKE_CUDA_ARCHITECTURES "")
    foreach(number 80 86 89 90 100 120)
      if(known MATCHES "sm_${number}[ \n]")
        list(APPEND CMAKE_CUDA_ARCHITECTURES ${number}-real)
        set(newest ${number})
      endif()
    endforeach()
    list(APPEND CMAKE_CUDA_ARCHITECTURES ${newest}-virtual)
  endif()
endif()

set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)

# As the CUDA headers write it (13000 is 13.0), and as nvcc does (sm_ for code, compute_ for PTX).
string(REGEX MATCH "^([0-9]+)\\.([0-9]+)" version "${CMAKE_CUDA_COMPILER_VERSION}")
math(EXPR KVOPS_CUDA_VERSION "${CMAKE_MATCH_1} * 1000 + ${CMAKE_MATCH_2} * 10")
set(KVOPS_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}")
list(TRANSFORM KVOPS_ARCHITECTURES REPLACE "^([0-9]+[af]?)-real$" "sm_\\1")
list(TRANSFORM KVOPS_ARCHITECTURES REPLACE "^([0-9]+[af]?)-virtual$" "compute_\\1")
list(TRANSFORM KVOPS_ARCHITECTURES REPLACE "^([0-9]+[af]?)$" "sm_\\1 compute_\\1")
list(JOIN KVOPS_ARCHITECTURES " " KVOPS_ARCHITECTURES)
message(STATUS "CUDA ${CMAKE_CUDA_COMPILER_VERSION}: ${KVOPS_ARCHITECTURES}")
