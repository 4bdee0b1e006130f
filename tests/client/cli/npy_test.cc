#include "client/cli/npy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

namespace attnd::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class Npy : public ::testing::Test {
 protected:
  Npy()
      : path_((std::filesystem::temp_directory_path() /
               ("attnctl_npy_" + std::to_string(::testing::UnitTest::GetInstance()->random_seed()) +
                "_" + ::testing::UnitTest::GetInstance()->current_test_info()->name() + ".npy"))
                  .string()) {}
  ~Npy() override { std::filesystem::remove(path_); }

  void WriteFile(const std::string& bytes) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes;
  }

  // A file of the given version with this header and payload.
  void WriteNpyFile(const std::string& header, const std::string& payload, char version = 1) {
    std::string bytes = "\x93NUMPY";
    bytes += version;
    bytes += '\0';
    bytes += static_cast<char>(header.size() & 0xff);
    bytes += static_cast<char>(header.size() >> 8);
    if (version == 2) bytes.append(2, '\0');
    WriteFile(bytes + header + payload);
  }

  // The error of reading the file; "" where there is none.
  std::string ReadError(v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED) {
    return std::string(ReadNpy(path_, dtype).status().message());
  }

  const std::string path_;
};

std::string Floats(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

TEST_F(Npy, ReadsWhatNumPyWrites) {
  // numpy.save of a (2, 3) float32 array, byte for byte.
  const std::string header =
      "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }" + std::string(58, ' ') + "\n";
  WriteNpyFile(header, Floats({1, 2, 3, 4, 5, 6}));
  const auto tensor = ReadNpy(path_, v1::DATA_TYPE_UNSPECIFIED);
  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_EQ(tensor->dtype, v1::DATA_TYPE_FLOAT32);
  EXPECT_EQ(tensor->shape, (std::vector<int64_t>{2, 3}));
  ASSERT_EQ(tensor->byte_size, 24);
  EXPECT_EQ(std::memcmp(tensor->data.get(), Floats({1, 2, 3, 4, 5, 6}).data(), 24), 0);
}

TEST_F(Npy, ReadsVersionTwoAndEveryShape) {
  WriteNpyFile("{'shape': (), 'descr': '<f4', 'fortran_order': False}\n", Floats({7}), 2);
  EXPECT_TRUE(ReadNpy(path_, v1::DATA_TYPE_FLOAT32)->shape.empty());
  WriteNpyFile("{'descr': '<i4', 'fortran_order': False, 'shape': (0, 5), }\n", "");
  EXPECT_EQ(ReadNpy(path_, v1::DATA_TYPE_INT32)->byte_size, 0);
  WriteNpyFile("{'descr': '<f2', 'fortran_order': False, 'shape': (3,), }\n", "abcdef");
  EXPECT_EQ(ReadNpy(path_, v1::DATA_TYPE_FLOAT16)->shape, std::vector<int64_t>{3});
}

TEST_F(Npy, ReadsBFloat16OnlyWhereItIsAskedFor) {
  for (const char* descr : {"<u2", "|V2", "<V2"}) {
    WriteNpyFile(
        "{'descr': '" + std::string(descr) + "', 'fortran_order': False, 'shape': (2,), }\n",
        "abcd");
    const auto tensor = ReadNpy(path_, v1::DATA_TYPE_BFLOAT16);
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    EXPECT_EQ(tensor->dtype, v1::DATA_TYPE_BFLOAT16);
    EXPECT_THAT(ReadError(), HasSubstr("--dtype bfloat16"));
    EXPECT_THAT(ReadError(v1::DATA_TYPE_FLOAT16), HasSubstr("--dtype bfloat16"));
  }
}

TEST_F(Npy, WritesWhatItReads) {
  for (const v1::DataType dtype : {v1::DATA_TYPE_FLOAT32, v1::DATA_TYPE_FLOAT16,
                                   v1::DATA_TYPE_BFLOAT16, v1::DATA_TYPE_INT32}) {
    for (const std::vector<int64_t>& shape :
         {std::vector<int64_t>{}, {4}, {2, 0, 3}, {2, 3, 4, 5, 6}}) {
      std::string data(static_cast<size_t>(*NumBytes(dtype, shape)), '\0');
      for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i);
      ASSERT_TRUE(WriteNpy(path_, dtype, shape, data).ok());
      const auto tensor = ReadNpy(path_, dtype);
      ASSERT_TRUE(tensor.ok()) << tensor.status();
      EXPECT_EQ(tensor->shape, shape);
      EXPECT_EQ(std::string(reinterpret_cast<const char*>(tensor->data.get()),
                            static_cast<size_t>(tensor->byte_size)),
                data);
      // Elements begin at a multiple of 64, as NumPy promises to those who map a file.
      EXPECT_EQ((std::filesystem::file_size(path_) - data.size()) % 64, 0u);
    }
  }
}

TEST_F(Npy, NamesTheFileInEveryError) {
  EXPECT_EQ(ReadNpy(path_, v1::DATA_TYPE_UNSPECIFIED).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(ReadError(), HasSubstr(path_));
  WriteFile("nothing of the kind");
  EXPECT_THAT(ReadError(), HasSubstr(path_ + ": is no .npy file"));
}

TEST_F(Npy, RefusesShortAndLongFiles) {
  const std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n";
  WriteNpyFile(header, Floats({1, 2, 3, 4, 5}));
  EXPECT_THAT(ReadError(), HasSubstr("20 bytes of elements, but its shape [2, 3]"));
  WriteNpyFile(header, Floats({1, 2, 3, 4, 5, 6, 7}));
  EXPECT_THAT(ReadError(), HasSubstr("28 bytes of elements"));
  for (const size_t length : {0, 3, 6, 7, 8, 9}) {
    WriteFile(std::string("\x93NUMPY\1\0\x40", 9).substr(0, length));
    EXPECT_THAT(ReadError(), Not("")) << length;
  }
  WriteFile(std::string("\x93NUMPY\1\0\x40\0", 10) + "{'descr'");
  EXPECT_THAT(ReadError(), HasSubstr("ends within its header"));
  WriteFile(std::string("\x93NUMPY\2\0\xff\xff\xff\xff", 12));
  EXPECT_THAT(ReadError(), HasSubstr("says its header has 4294967295 bytes"));
  WriteNpyFile(header, "", 3);
  EXPECT_THAT(ReadError(), HasSubstr("format version 3"));
}

TEST_F(Npy, RefusesWhatItCannotRepresent) {
  const auto header = [](const std::string& descr, const std::string& order,
                         const std::string& shape) {
    return "{'descr': '" + descr + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }\n";
  };
  WriteNpyFile(header("<f8", "False", "(1,)"), "12345678");
  EXPECT_THAT(ReadError(), HasSubstr("type '<f8'"));
  WriteNpyFile(header(">f4", "False", "(1,)"), "1234");
  EXPECT_THAT(ReadError(), HasSubstr("type '>f4'"));
  WriteNpyFile(header("<f4", "True", "(1,)"), "1234");
  EXPECT_THAT(ReadError(), HasSubstr("Fortran order"));
  WriteNpyFile(header("<f4", "False", "(4294967296, 4294967296, 4)"), "1234");
  EXPECT_THAT(ReadError(), HasSubstr("more than 2^63"));
  WriteNpyFile(header("<f2", "False", "(2,)"), "1234");
  EXPECT_THAT(ReadError(v1::DATA_TYPE_FLOAT32), HasSubstr("holds FLOAT16"));
}

TEST_F(Npy, RefusesHeadersThatAreNoSuchDict) {
  for (const char* header : {
           "",
           "{",
           "{}",
           "[1]",
           "{'descr': '<f4'}",
           "{'descr': '<f4', 'fortran_order': False}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} x",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (1 2)}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}",
           "{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}",
           "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}",
           "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'more': True}",
       }) {
    WriteNpyFile(header, "1234");
    EXPECT_THAT(ReadError(), HasSubstr("has a header that cannot be read")) << header;
  }
}

TEST_F(Npy, RefusesToWriteBytesThatAreNotTheShapes) {
  EXPECT_FALSE(WriteNpy(path_, v1::DATA_TYPE_FLOAT32, {2}, "1234").ok());
  EXPECT_FALSE(std::filesystem::exists(path_));
  EXPECT_FALSE(WriteNpy("/nowhere/at/all.npy", v1::DATA_TYPE_FLOAT32, {1}, "1234").ok());
}

}  // namespace
}  // namespace attnd::cli
