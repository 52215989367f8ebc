package gateway_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	chatPath       = "/v1/chat/completions"
	completionPath = "/v1/completions"
)

// failure reads OpenAI's error object and holds its shape.
func failure(t *testing.T, r reply) (code, param, kind string) {
	t.Helper()
	require.NoError(t, r.err)
	require.Equal(t, "application/json", r.header.Get("Content-Type"), r.body)
	var e struct {
		Error struct {
			Message, Type, Code string
			Param               *string
		}
	}
	require.NoError(t, json.Unmarshal([]byte(r.body), &e), r.body)
	require.NotEmpty(t, e.Error.Message)
	if e.Error.Param != nil {
		param = *e.Error.Param
	}
	return e.Error.Code, param, e.Error.Type
}
