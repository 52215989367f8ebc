package testbed

import (
	"fmt"
	"strings"
)

// Events gives the data of each event of a stream to take, and says whether the end
// was told by [DONE]. An event behind that is an error.
func Events(stream []byte, take func(data []byte) error) (done bool, err error) {
	for event := range strings.SplitSeq(strings.ReplaceAll(string(stream), "\r\n", "\n"), "\n\n") {
		var data []string
		for line := range strings.SplitSeq(event, "\n") {
			if rest, ok := strings.CutPrefix(line, "data:"); ok {
				data = append(data, strings.TrimPrefix(rest, " "))
			}
		}
		switch text := strings.Join(data, "\n"); {
		case data == nil:
		case done:
			return done, fmt.Errorf("an event after [DONE]: %.200q", text)
		case text == "[DONE]":
			done = true
		default:
			if err := take([]byte(text)); err != nil {
				return done, err
			}
		}
	}
	return done, nil
}
