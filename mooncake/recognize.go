package mooncake

import "evenkeel/internal/rawjson"

// ConnectorOf returns the connector whose hand-off is in a probe's answer, by keys that only one
// connector uses (testdata/handoffs); empty: none, or several could have made it.
func ConnectorOf(answer []byte) string {
	members, err := scanAnswer(answer)
	if err != nil || len(members.kv) == 0 || members.kv[0] != '{' {
		return ""
	}
	found := ""
	for key, value := range rawjson.Members(members.kv) {
		switch key {
		case "transfer_mode": // only NIXL, from vLLM 0.32 on
			if string(value) == `"push"` {
				return NIXLPush
			}
			found = NIXLPull
		case "tp_size": // only NIXL
			found = NIXLPull
		case "last_token_id", "remote_ptp_size", "num_prompt_blocks":
			return AscendMooncakeV1
		}
	}
	return found
}
