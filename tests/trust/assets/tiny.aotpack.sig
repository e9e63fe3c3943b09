{
  "schema": "aotpack.signatures/1",
  "digest": "b85d7847edc5d5813d6b992d385ecb043c50ad81c21c731c329cac4443a2f15e",
  "signatures": [
    {
      "key_id": "ab5eb85ea8aa1c7e9996decc1b5e446a6c5682ee98947484e1c14be14fb7c998",
      "public_key": "4e676612fb52c540ff2503461ae4b714dcfc1383b22c5532f669e209f5b7949b",
      "signature": "FHmO72tqIv5MTqHHmHof44mTxyowlddnXzjuHtKBEgZpUtqA+JJsGczDw7qGrIWibTSCq7Wxlz0cb1PDiWMCBA=="
    }
  ]
}
