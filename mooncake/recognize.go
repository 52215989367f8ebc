package mooncake

import "evenkeel/internal/rawjson"

// ConnectorOf returns the connector whose hand-off is in a probe's answer; empty: there is no hand-off, or several connectors could have
// made it. It looks for keys that only one connector uses: see testdata/handoffs.
func ConnectorOf(answer []byte) string {
	members, err := scanAnswer(answer)
	if err != nil || len(members.kv) == 0 || members.kv[0] != '{' {
		return ""
	}
	found := ""
	for key, value := range rawjson.Members(members.kv) {
		switch key {
		case "transfer_mode": // only NIXL has this key, from vLLM 0.32 on
			if string(value) == `"push"` {
				return NIXLPush
			}
			found = NIXLPull
		case "tp_size": // only NIXL has this key
			found = NIXLPull
		case "last_token_id", "remote_ptp_size", "num_prompt_blocks":
			return AscendMooncakeV1
		}
	}
	return found
}
