# PyTorch as the build's Python has it: headers to compile with, libraries to link to. Its own CMake package is not asked,
# since that of a CUDA build wants a CUDA toolkit.

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
          "from importlib.util import find_spec; print(find_spec('torch').submodule_search_locations[0])"
  OUTPUT_VARIABLE torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE
  ERROR_QUIET
  RESULT_VARIABLE status
)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "kvops is built with PyTorch's headers, but ${Python_EXECUTABLE} finds no torch:\n"
                      "  pip install 'torch>=2.11'")
endif()

set(version_header "${torch_dir}/include/torch/headeronly/version.h")
set(torch_version "older than 2.11")
if(EXISTS "${version_header}")
  file(READ "${version_header}" text)
  if(text MATCHES "TORCH_VERSION_MAJOR ([0-9]+).*TORCH_VERSION_MINOR ([0-9]+)")
    set(torch_version "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}")
  endif()
endif()
if(torch_version VERSION_LESS 2.11)
  message(FATAL_ERROR "kvops needs the headers of PyTorch 2.11 or newer; ${torch_dir} is ${torch_version}")
endif()
message(STATUS "PyTorch ${torch_version} in ${torch_dir}")

function(kvops_link_torch target)
  # The stable ABI as of PyTorch 2.11, whatever newer headers offer.
  target_compile_definitions(${target} PRIVATE TORCH_TARGET_VERSION=0x020b000000000000)
  target_include_directories(${target} SYSTEM PRIVATE
    "${torch_dir}/include" "${torch_dir}/include/torch/csrc/api/include")
  # Named even where no symbol of theirs is used directly: Python loads PyTorch's libraries privately, so that this library
  # finds in them only what it names itself.
  target_link_libraries(${target} PRIVATE
    -Wl,--push-state,--no-as-needed
    "${torch_dir}/lib/libtorch.so" "${torch_dir}/lib/libtorch_cpu.so" "${torch_dir}/lib/libc10.so"
    -Wl,--pop-state)
  set_target_properties(${target} PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN/../torch/lib")
endfunction()
