# attnd_python_test(name script): a Python test against the server that this build makes, with the
# Python client of the source tree. NumPy gets one thread: on busy cores OpenBLAS's threads wait for
# each other in spin loops.
function(attnd_python_test name script)
  add_test(NAME ${name} COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/${script})
  set(environment ATTND_SERVER=$<TARGET_FILE:attnd> PYTHONPATH=${CMAKE_SOURCE_DIR}/client/python/src
                  OPENBLAS_NUM_THREADS=1)
  set_tests_properties(${name} PROPERTIES ENVIRONMENT "${environment}"
                                          FIXTURES_REQUIRED python_client TIMEOUT 300)
endfunction()
