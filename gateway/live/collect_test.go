package live

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestTheConfigOfTheStartIsNoReload(t *testing.T) {
	began := time.UnixMilli(5000)
	require.Zero(t, reloaded(began, began))
	require.Equal(t, int64(7000), reloaded(time.UnixMilli(7000), began))
}
