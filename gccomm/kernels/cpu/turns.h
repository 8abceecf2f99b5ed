// Lanes that are encoded and others that are decoded in one loop.
#pragma once
#include "decode.h"

namespace gccomm::GCCOMM_LEVEL {

// Block by block in turns: memory takes the results of one block while the next one is encoded, and brings
// the blocks to come while one is decoded.
inline void encode_and_decode(const Batch& ahead, const EncodeArgs& to, const Batch& behind,
                              const DecodeArgs& from) {
    const FloatEnvironment environment;
    Encoding encoding(ahead, to);
    Decoding decoding(behind, from);
    for (bool encodes = true, decodes = true; encodes || decodes;) {
        decodes = decodes && decoding.next();
        encodes = encodes && encoding.next();
    }
    encoding.finish();
    decoding.finish();
}

}  // namespace gccomm::GCCOMM_LEVEL
